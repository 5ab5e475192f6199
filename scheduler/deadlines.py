"""Whose prompt is computed first when first tokens are wanted within a time.

In order of arrival, a burst makes everybody late who comes behind its longest prompts. To have as
many first tokens in time as possible, the prompts are gone through in the order of their deadlines,
and whenever one would be late, the longest so far is put off: J. M. Moore, "An n job, one machine
sequencing algorithm for minimizing the number of late jobs", Management Science 15 (1968).

All tokens of a step come when it ends. A deadline is therefore counted in prompt tokens: as many as
the steps compute that have ended by then. What a step has begun after that helps nobody.
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
_WEIGHT = 0.2  # of the newest step in a running mean


def is_chunk(seq: Sequence) -> bool:
    """Whether a running sequence has several tokens to compute, and blocks for all of them."""
    has_room = seq.num_tokens <= seq.capacity and not seq.tail_shared
    return has_room and seq.num_tokens - seq.num_computed > 1


class StepTimes:
    """How long a step takes by its prompt tokens, measured on the way.

    Between a step without any, as decodes alone take it, and one that is mostly prompts, time grows
    in proportion to them. A running mean is kept of either.
    """

    def __init__(self) -> None:
        self._decodes_s = self._tokens = self._mixed_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a step of prompts has been seen."""
        return self._tokens > 0

    def saw(self, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """Take in that a step with so many tokens, the prompts' among them, has taken so long."""
        if not prompt_tokens:
            self._decodes_s += (_WEIGHT if self._decodes_s else 1.0) * (seconds - self._decodes_s)
        elif 2 * prompt_tokens > tokens:
            weight = _WEIGHT if self._tokens else 1.0
            self._tokens += weight * (prompt_tokens - self._tokens)
            self._mixed_s += weight * (seconds - self._mixed_s)

    def seconds(self, prompt_tokens: int) -> float:
        """Of a step with so many prompt tokens."""
        least = min(self._decodes_s, self._mixed_s)
        return least + (self._mixed_s - least) * prompt_tokens / self._tokens


class Deadlines:
    """Orders prompts by what can still be in time, if steps take as long as they did.

    Their time is that between the ends of steps that the device did one right after the other.
    Before the first of them with prompts there is none, and the order is that of arrival.

    Args:
        target_s: from the arrival of a request to its first token.
        clock: seconds.

    Attributes:
        clock: the same.
        times: what steps take.
    """

    def __init__(self, target_s: float, clock: Clock) -> None:
        self.clock = clock
        self.times = StepTimes()
        self._target_s = target_s
        self._began: float | None = None  # the step that ends next; None: the device was idle
        self._put_off: dict[int, int] = {}  # `num_computed` of those that got nothing yet, by id

    def took(self, plan: StepPlan, *, next_began: bool, is_awaited: bool = True) -> None:
        """Take in that a plan is done.

        Args:
            plan: the oldest one.
            next_began: whether the device had the next one already.
            is_awaited: whether any of its sequences goes on. If not, it may have been done long
                ago: once all requests have ended, nobody looks before another one comes.
        """
        now = self.clock()
        if is_awaited and self._began is not None and now > self._began:
            self.times.saw(_prompt_tokens(plan), plan.num_tokens, now - self._began)
        self._began = now if is_awaited and next_began else None

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
        for seq in self.order(left, ahead, step.tokens_left):
            if not step.chunk(seq):
                break
            if before.get(seq.seq_id) == seq.num_computed and is_chunk(seq):
                blocks.admit_anew(seq)
            step.add(seq, step.chunk(seq))

    def order(
        self, seqs: Iterable[Sequence], ahead: Iterable[StepPlan], step_tokens: int
    ) -> list[Sequence]:
        """The order in which sequences are to share the tokens of the next step.

        More urgent ones come first; of equal priority, those that have waited for too long or that
        have had their first token, then those that can be in time, then those that are put off,
        each in the order of arrival.

        Args:
            seqs: that have something to compute, in the order of service.
            ahead: plans that the device has not finished.
            step_tokens: prompt tokens that the next step, and each one after it, has room for.
        """
        if not self.times.is_known or not step_tokens:
            return list(seqs)
        now = self.clock()
        began = now if self._began is None else self._began
        start = max(now, began + sum(self.times.seconds(_prompt_tokens(plan)) for plan in ahead))
        step_s = self.times.seconds(step_tokens)
        ordered: list[Sequence] = []
        before = 0  # tokens of those that go first
        for _, group in groupby(seqs, key=lambda seq: seq.request.priority):
            equals = list(group)
            first = [seq for seq in equals if self._is_first(seq, now)]
            rest = [seq for seq in equals if not self._is_first(seq, now)]
            before += sum(map(_tokens_left, first))
            due = {
                seq.seq_id: step_tokens * ((seq.arrived + self._target_s - start) // step_s)
                for seq in rest
            }
            in_time = _in_time(rest, due, before)
            kept = [seq for seq in rest if seq.seq_id in in_time]
            put_off = [seq for seq in rest if seq.seq_id not in in_time]
            ordered += [*first, *kept, *put_off]
            before += sum(map(_tokens_left, rest))
        return ordered

    def _is_first(self, seq: Sequence, now: float) -> bool:
        return seq.num_known > seq.prompt_len or now - seq.arrived > PATIENCE * self._target_s


def _prompt_tokens(plan: StepPlan) -> int:
    return int(plan.counts[plan.num_decodes :].sum())


def _tokens_left(seq: Sequence) -> int:
    """What is left of a sequence to compute."""
    return seq.num_tokens - seq.num_computed


def _in_time(seqs: AbstractSequence[Sequence], due: dict[int, float], before: int) -> set[int]:
    """The most of some sequences that can be in time.

    Args:
        seqs: in the order of their deadlines.
        due: prompt tokens that are computed by the deadline of each, by `seq_id`.
        before: tokens that are computed before all of theirs.
    """
    kept: list[tuple[int, int]] = []  # (-tokens, -seq_id), a heap: the longest, latest first
    total = before
    for seq in seqs:
        tokens = _tokens_left(seq)
        if before + tokens > due[seq.seq_id]:  # not even if it were next
            continue
        heapq.heappush(kept, (-tokens, -seq.seq_id))
        total += tokens
        if total > due[seq.seq_id]:
            total += heapq.heappop(kept)[0]
    return {-negative for _, negative in kept}
