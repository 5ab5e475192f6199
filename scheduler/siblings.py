"""Sequences of one prompt: whose blocks a waiting one can share; choices of a beam search."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.admission import Admission
from scheduler.sequence import Sequence, Status


class BeamChoice(NamedTuple):
    """How one beam of a search goes on.

    Attributes:
        request_id: the beam.
        parent_id: the beam whose tokens it takes over, itself perhaps.
        token_id: the token that follows them.
    """

    request_id: str
    parent_id: str
    token_id: int


def is_to_wait(seq: Sequence, admission: Admission) -> bool:
    """Whether a waiting sequence is to be passed over, and younger ones served.

    A beam that has not been chosen has nothing to compute. A sibling that is computing the common
    prompt will soon share it. What is being read from the disk will soon be there.
    """
    if seq.held or any(held.reading for held in seq.coming or ()):
        return True
    if not seq.siblings or seq.saved is not None:
        return False
    source = source_of(seq, admission)
    have = 0 if source is None else admission.num_shareable(seq, source)
    return have < admission.num_shareable_at_most(seq) and any(
        other.status is Status.RUNNING
        and not other.held
        and admission.is_current(other)
        and other.num_written < admission.num_shareable_at_most(seq)
        for other in seq.siblings
    )


def source_of(seq: Sequence, admission: Admission) -> Sequence | None:
    """The running sibling that has most to share with a waiting sequence; None if none has."""
    best, most = None, 0
    for other in seq.siblings:
        if other.status is Status.RUNNING:
            have = admission.num_shareable(seq, other)
            if have > most:
                best, most = other, have
    return best
