"""What came of a step: its tokens, and who has ended by them."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.plan import StepPlan
from scheduler.request import FinishReason
from scheduler.sequence import NO_ROW, Sequence, Status


class SeqEnd(NamedTuple):
    """Why a sequence has ended, and the token that ended it, if one did."""

    reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepUpdate:
    """What became known by a step about those of its sequences that had not ended.

    Kept in columns like the plan; sequences go by their index there.

    Attributes:
        plan: the step's.
        indices: sequences with a new token, in rising order.
        token_ids: that of each of them.
        ends: those of them that end by it.
        beams: beams that have reached their end and wait for `Scheduler.choose_beams`.
        num_cached_tokens: prompt tokens of every sequence of the plan that were found in the
            prefix cache; empty if nobody was left when the step was done.
    """

    plan: StepPlan
    indices: list[int]
    token_ids: list[int]
    ends: dict[int, SeqEnd]
    beams: list[int]
    num_cached_tokens: list[int]


def take_in(plan: StepPlan, seqs: AbstractSequence[Sequence], tokens: list[int]) -> StepUpdate:
    """Append a step's tokens to its sequences; a beam only waits for one.

    Args:
        plan: what the step computed.
        seqs: its sequences; none if no request is left, of this step or another.
        tokens: that of each sample row.
    """
    indices: list[int] = []
    new: list[int] = []
    ends: dict[int, SeqEnd] = {}
    beams: list[int] = []
    rows: list[int] = plan.drawn_rows[: len(seqs)].tolist()
    finished = Status.FINISHED
    for index, seq, row in zip(range(len(seqs)), seqs, rows, strict=True):
        if row == NO_ROW or seq.status is finished:
            continue
        if seq.held:
            seq.num_written = seq.num_computed  # no newer plan has it
            beams.append(index)
            continue
        token = tokens[row]
        seq.outputs.append(token)
        seq.num_known += 1
        indices.append(index)
        new.append(token)
        if seq.num_known >= seq.limit or token in seq.stop_token_ids:
            end = _end(seq, token)
            if end is not None:
                ends[index] = end
    return StepUpdate(
        plan=plan,
        indices=indices,
        token_ids=new,
        ends=ends,
        beams=beams,
        num_cached_tokens=[seq.num_cached_tokens or 0 for seq in seqs],
    )


def _end(seq: Sequence, token: int) -> SeqEnd | None:
    """How a sequence ends whose newest token is this one; None if it goes on."""
    stop = seq.request.stop
    if token in stop.stop_token_ids and len(seq.outputs) > stop.min_tokens:
        return SeqEnd(FinishReason.STOP, token)
    return SeqEnd(FinishReason.LENGTH, None) if seq.num_known >= seq.limit else None
