"""How the rows of a step are drawn: from its plan to the inputs of a compiled draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pagedjax.engine.batch import pack_sampling, sampled_positions
from pagedjax.engine.in_flight import Members
from pagedjax.engine.penalties import SeenOwners
from pagedjax.engine.requests import PromptTarget
from pagedjax.engine.sampling_records import SamplingRecords
from pagedjax.engine.step_inputs import SamplingLayout
from scheduler import StepPlan
from scheduler.plan import Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What the runner is told of the draws of a step.

    Attributes:
        sampling: packed; None if the argmax is all that is wanted.
        full: whether any row has a filter or penalties, or wants log-probabilities.
        penalties: whether any row has penalties.
        reset: arguments of `SeenTokens.reset` before the step; None without penalties.
        targets: rows that report on prompt tokens.
    """

    sampling: np.ndarray | None = None
    full: bool = False
    penalties: bool = False
    reset: tuple[np.ndarray, np.ndarray] | None = None
    targets: list[PromptTarget] = field(default_factory=list)


def plan_draws(
    plan: StepPlan,
    members: Members,
    table: SamplingRecords,
    *,
    num_rows: int,
    seen: SeenOwners,
    seen_rows: np.ndarray,
    known_tokens: Callable[[str], tuple[Int32, Int32]],
) -> Draws:
    """The draws of a plan.

    Args:
        plan: what the step computes.
        members: who is in the plan.
        table: the sampling records.
        num_rows: rows of the compiled draw.
        seen: who has which row of the counts that penalties go by; changed here.
        seen_rows: int32[seqs], the row of each sequence of the plan.
        known_tokens: `Scheduler.known_tokens`.
    """
    # Of a row that is plain some time only the last token is sampled: no prompt token is reported.
    if ((plan.seq_lens() >= members.plain_from) | (plan.sample_counts == 0)).all():
        return Draws()
    positions = sampled_positions(plan)
    owners = np.repeat(np.arange(plan.num_seqs), plan.sample_counts)
    rows = members.records[owners]
    records = table.gather(rows, positions)
    targets = [
        PromptTarget(members.pairs[owners[row]][0], int(row), int(positions[row]))
        for row in np.flatnonzero(positions < records["prompt_len"])
    ]
    reset = None
    penalized = owners[records["penalized"]]  # each sequence once: the last of its rows
    if len(penalized):
        reset = seen.take(
            seen_rows[penalized],
            np.array(plan.seq_ids, np.int64)[penalized],
            lambda index: known_tokens(plan.request_ids[penalized[index]]),
        )
    layout = SamplingLayout(num_rows, penalties=reset is not None)
    sampling = pack_sampling(
        layout, records, targets, positions=positions, seen_rows=seen_rows[owners]
    )
    wanted = records["reports"] | records["filtered"] | records["penalized"]
    return Draws(
        sampling=sampling,
        full=bool(targets) or bool(wanted.any()),
        penalties=reset is not None,
        reset=reset,
        targets=targets,
    )
