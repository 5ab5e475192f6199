"""From a plan of the scheduler to the packed inputs of compiled code, without a token loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedjax.engine.requests import PromptTarget
from pagedjax.engine.sampling_records import NO_ID
from pagedjax.engine.step_inputs import DRAWN, UNREPORTED, SamplingLayout, StepLayout
from scheduler import StepPlan


def sampled_positions(plan: StepPlan) -> np.ndarray:
    """Position of the token that each sampled row draws or predicts, int32[num_samples]."""
    return plan.positions()[plan.sample_rows()] + 1


def pack_inputs(plan: StepPlan, layout: StepLayout, *, block_size: int) -> np.ndarray:
    """What a step computes, as a fresh sealed vector; never written again: the device may alias it.

    Args:
        plan: what to compute.
        layout: the bucket's layout; its bucket holds the plan.
        block_size: tokens per block.
    """
    packed = np.zeros(layout.size, np.int32)
    view = layout.views(packed)
    tokens, seqs, rows = plan.num_tokens, len(plan.seqs), plan.num_samples
    query_start = plan.query_start()

    view["token_ids"][:tokens] = plan.token_ids
    view["feed_rows"][:] = -1
    view["feed_rows"][query_start[1:] - 1] = plan.feed_rows
    view["positions"][:tokens] = plan.positions()
    view["slot_mapping"][:tokens] = plan.slot_mapping(block_size)
    view["block_tables"][:seqs] = plan.block_tables
    view["seq_lens"][:seqs] = plan.seq_lens()
    view["query_start"][: seqs + 1] = query_start
    view["query_start"][seqs + 1 :] = tokens  # padding sequences own no token
    view["sample_rows"][:rows] = plan.sample_rows()
    return layout.sealed(packed)


def pack_sampling(
    layout: SamplingLayout,
    records: np.ndarray,
    targets: Sequence[PromptTarget],
    *,
    positions: np.ndarray,
) -> np.ndarray:
    """How a step's rows are drawn, as a fresh sealed vector.

    Args:
        layout: for at least as many rows as there are records.
        records: sampling record of each sampled row.
        targets: rows that predict prompt tokens.
        positions: `sampled_positions` of the plan.
    """
    packed = np.zeros(layout.size, np.int32)
    view = layout.views(packed)
    rows = len(records)
    for name in ("temperature", "top_p", "min_p", "top_k", "sample_index"):
        view[name][:rows] = records[name]
    view["seed"][:rows] = records["seed"].view(np.int32)
    view["position"][:rows] = positions
    view["target"][:] = UNREPORTED
    view["target"][:rows][records["reports"]] = DRAWN
    for target in targets:
        view["target"][target.row] = target.token_id
    view["banned_ids"][:] = NO_ID
    view["banned_ids"][:rows] = records["stop_ids"]
    return layout.sealed(packed)
