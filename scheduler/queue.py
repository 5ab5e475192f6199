"""Who runs and who waits, each in the order of service."""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from itertools import takewhile

from scheduler.sequence import Sequence, Status


def urgency(seq: Sequence) -> tuple[int, int]:
    """Orders sequences as they are served: by priority, lower values first, then by arrival."""
    return seq.request.priority, seq.seq_id


class Queues:
    """The sequences that own blocks and those that wait for them, each in the order of `urgency`.

    Attributes:
        running: those that own blocks.
        waiting: those that wait, new or preempted.
    """

    def __init__(self) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def overdue(self) -> list[Sequence]:
        """The waiting sequences that are strictly more urgent than the last running one."""
        if not self.running:
            return []
        last = self.running[-1].request.priority
        return list(takewhile(lambda seq: seq.request.priority < last, self.waiting))

    def run(self, seq: Sequence) -> None:
        """Count a waiting sequence that has been given blocks among those that run."""
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=urgency)

    def wait(self, seq: Sequence) -> None:
        """Let a sequence that is new or has lost its blocks wait in its place among the others."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        seq.status = Status.WAITING
        if not self.waiting or urgency(self.waiting[-1]) < urgency(seq):
            self.waiting.append(seq)
        else:
            self.waiting.insert(bisect(self.waiting, urgency(seq), key=urgency), seq)

    def leave(self, seq: Sequence, status: Status) -> None:
        """Take a sequence out of the queue that it may be in, and give it another status."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = status
