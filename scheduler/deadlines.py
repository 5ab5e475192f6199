"""Whose prompt is computed first when first tokens are wanted within a time.

In order of arrival, a burst makes everybody late who comes behind its longest prompts. To have as
many first tokens in time as possible, the prompts are gone through in the order of their deadlines,
and whenever one would be late, the longest so far is put off: J. M. Moore, "An n job, one machine
sequencing algorithm for minimizing the number of late jobs", Management Science 15 (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from itertools import groupby

from scheduler.block_manager import BlockManager
from scheduler.plan import StepPlan
from scheduler.sequence import Sequence
from scheduler.step_builder import StepBuilder

# After so many times the target, whoever was put off goes first. Under a load that lasts beyond
# what can be computed that is everybody, and the order is that of arrival again.
PATIENCE = 3
Clock = Callable[[], float]
_WEIGHT = 0.2  # of the newest rate in their running mean


def is_chunk(seq: Sequence) -> bool:
    """Whether a running sequence has several tokens to compute, and blocks for all of them."""
    has_room = seq.num_tokens <= seq.capacity and not seq.tail_shared
    return has_room and seq.num_tokens - seq.num_computed > 1


class Deadlines:
    """Orders prompts by what can still be in time, at the rate at which prompts are computed.

    The rate is measured on the way, from the time between the ends of steps that the device did one
    right after the other. Before the first of them there is none, and the order is that of arrival.

    Args:
        target_s: from the arrival of a request to its first token.
        clock: seconds.

    Attributes:
        clock: the same.
        tokens_per_s: prompt tokens computed per second, while prompts are computed.
    """

    def __init__(self, target_s: float, clock: Clock) -> None:
        self.clock = clock
        self.tokens_per_s = 0.0
        self._target_s = target_s
        self._began: float | None = None  # the step that ends next; None: the device was idle
        self._put_off: dict[int, int] = {}  # `num_computed` of those that got nothing yet, by id

    def took(self, plan: StepPlan, *, next_began: bool) -> None:
        """Take in that a plan is done.

        Args:
            plan: the oldest one.
            next_began: whether the device had the next one already.
        """
        now = self.clock()
        tokens = int(plan.counts[plan.num_decodes :].sum())
        # A step of few prompt tokens takes its time for something else.
        if self._began is not None and now > self._began and 2 * tokens > plan.num_tokens:
            rate = tokens / (now - self._began)
            self.tokens_per_s += (_WEIGHT if self.tokens_per_s else 1.0) * (
                rate - self.tokens_per_s
            )
        self._began = now if next_began else None

    def share_out(
        self,
        step: StepBuilder,
        running: Iterable[Sequence],
        ahead: Iterable[StepPlan],
        blocks: BlockManager,
    ) -> None:
        """Let those that have all their blocks share what is left of a step.

        Many are admitted long before it is their turn. What of their prompts has been computed for
        others meanwhile is not computed again.

        Args:
            step: with all in it that goes before them.
            running: in the order of service.
            ahead: plans that the device has not finished.
            blocks: of the running sequences.
        """
        planned = {seq.seq_id for seq in step.seqs}
        left = [
            seq
            for seq in running
            if not (seq.held or seq.tail_shared or seq.seq_id in planned)
            and seq.num_computed < seq.num_tokens <= seq.capacity
        ]
        before = self._put_off
        self._put_off = {seq.seq_id: before.get(seq.seq_id, seq.num_computed) for seq in left}
        for seq in self.order(left, ahead):
            if not step.chunk(seq):
                break
            if before.get(seq.seq_id) == seq.num_computed and is_chunk(seq):
                _find_again(seq, blocks)
            step.add(seq, step.chunk(seq))

    def order(self, seqs: Iterable[Sequence], ahead: Iterable[StepPlan]) -> list[Sequence]:
        """The order in which sequences are to share the tokens of the next step.

        More urgent ones come first; of equal priority, those that have waited for too long or that
        have had their first token, then those that can be in time, then those that are put off,
        each in the order of arrival.

        Args:
            seqs: that have something to compute, in the order of service.
            ahead: plans that the device has not finished.
        """
        if not self.tokens_per_s:
            return list(seqs)
        now = self.clock()
        began = now if self._began is None else self._began
        done = max(now, began + sum(plan.num_tokens for plan in ahead) / self.tokens_per_s)
        ordered: list[Sequence] = []
        for _, group in groupby(seqs, key=lambda seq: seq.request.priority):
            equals = list(group)
            first = [seq for seq in equals if self._is_first(seq, now)]
            rest = [seq for seq in equals if not self._is_first(seq, now)]
            done += sum(map(self._seconds, first))
            in_time = self._in_time(rest, done)
            kept = [seq for seq in rest if seq.seq_id in in_time]
            put_off = [seq for seq in rest if seq.seq_id not in in_time]
            ordered += [*first, *kept, *put_off]
            done += sum(map(self._seconds, rest))
        return ordered

    def _is_first(self, seq: Sequence, now: float) -> bool:
        return seq.num_known > seq.prompt_len or now - seq.arrived > PATIENCE * self._target_s

    def _seconds(self, seq: Sequence) -> float:
        """What is left of a sequence to compute."""
        return (seq.num_tokens - seq.num_computed) / self.tokens_per_s

    def _in_time(self, seqs: AbstractSequence[Sequence], done: float) -> set[int]:
        """The most of these that can be in time, from the time at which the others are done."""
        kept: list[tuple[float, int]] = []  # (-seconds, -seq_id), a heap: the longest, latest first
        start = done
        for seq in seqs:
            seconds, deadline = self._seconds(seq), seq.arrived + self._target_s
            if start + seconds > deadline:  # not even if it were next
                continue
            heapq.heappush(kept, (-seconds, -seq.seq_id))
            done += seconds
            if done > deadline:
                done += heapq.heappop(kept)[0]
        return {-negative for _, negative in kept}


def _find_again(seq: Sequence, blocks: BlockManager) -> None:
    """Admit a sequence anew if the cache has more of it than when it was admitted."""
    before = seq.num_computed
    if len(blocks.find_prefix(seq)) * blocks.pool.index.block_size <= before:
        return
    is_first = seq.num_cached_tokens == before and not seq.outputs
    blocks.free(seq)
    admitted = blocks.admit(seq, keep_free=0)
    assert admitted, "it needs no more blocks than it had"
    if is_first:
        blocks.num_hit_tokens += seq.num_computed - before
        seq.num_cached_tokens = seq.num_computed
