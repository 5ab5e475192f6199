"""Decides what every step computes, and takes in what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.deadlines import Clock, Deadlines, is_chunk
from scheduler.plan import Int32, StepPlan
from scheduler.queue import Queues, urgency
from scheduler.request import Request
from scheduler.request_checks import check_siblings, checked_prompt
from scheduler.sequence import NO_ROW, Sequence, Status
from scheduler.siblings import BeamChoice, is_to_wait, source_of
from scheduler.step_builder import NOBODY, StepBuilder
from scheduler.step_update import StepUpdate, take_in
from scheduler.transfers import SwapCost

MAX_PLANS_IN_FLIGHT = 2


class Scheduler:
    """Continuous batching over a pool of KV blocks: by priority, and then first come, first served.

    The caller alternates `schedule` and `update`. It may run one plan ahead of the results:

        plan1 = schedule(); dispatch(plan1)
        plan2 = schedule(); dispatch(plan2); update(plan1, tokens1)
        plan3 = schedule(); dispatch(plan3); update(plan2, tokens2) ...

    A plan counts as computed as soon as it is handed out, which is right because the device
    computes plans in that order. What a later plan needs of an earlier one it finds in the cache,
    or, for the newest token, in a sample row of the plan before it (`ScheduledSeq.feed_row`).
    Blocks that were given up may therefore be handed out again at once: whoever writes them next
    does so in a later plan.

    Order: sequences are served by (`Request.priority`, arrival), and the running ones are the
    first in this order. Each step serves them and then admits waiting ones until a budget is used
    up. When a running sequence needs a block and none is free, the last of the running ones loses
    its blocks and goes back to its place in the queue, later to compute its prompt and outputs
    again. So it does when one arrives that is strictly more urgent and finds no place or no
    memory. The first never stands back for another, and alone it fits (`max_seq_len`), so it
    always finishes, and so do all of them once nothing more urgent arrives.

    Against sequences that come and go without progress: a sequence is admitted only when the
    blocks of *all* the tokens it has are free, and gets them at once, so that it cannot run out in
    the middle of its prompt; one percent of the pool stays free for the growth of those that
    already run; and nothing is admitted in a step that preempted, but what it made way for.

    Siblings (`Request.sibling_of`) have a prompt in common, which is computed once. Until the
    first of them has done so the others are passed over, and later sequences are served.

    Beams wait after every step for `choose_beams`. One that was preempted computes its tokens
    again while the others wait with their blocks; where these leave no room for it, and nothing
    else can be done, they give way.

    With `SchedulerConfig.ttft_target_s` sequences still get blocks in this order, but those with a
    prompt to compute share what the decodes leave of a step in the order of `Deadlines`.

    Args:
        config: sizes and budgets.
        clock: seconds; read only if a first token is wanted within a time.

    Attributes:
        config: the same.
        blocks: the block tables of the running sequences, and the pool behind them.
        swap_cost: what the preemption "auto" goes by; without it sequences recompute.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock = time.monotonic) -> None:
        self.config = config
        self._deadlines = Deadlines(config.ttft_target_s, clock) if config.ttft_target_s else None
        self.blocks = BlockManager(config)
        self.swap_cost: SwapCost | None = None
        self._watermark = config.num_blocks // 100
        self._next_seq_id = 0
        self._live: dict[int, Sequence] = {}
        self._by_request_id: dict[str, Sequence] = {}
        self._queues = Queues()
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._roster = NOBODY  # of the newest plan
        self._num_preemptions = self._num_swaps = 0

    @property
    def max_seq_len(self) -> int:
        """Longest sequence served, in tokens, prompt and output together."""
        return self.config.max_seq_len

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted, preempted ones among them."""
        return len(self._queues.waiting)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that belong to a sequence."""
        return self.blocks.pool.num_used

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out."""
        return self.blocks.pool.num_free

    @property
    def num_preemptions(self) -> int:
        """How often a sequence has lost its blocks so far."""
        return self._num_preemptions

    @property
    def num_swaps(self) -> int:
        """In how many of the preemptions its blocks went to host memory."""
        return self._num_swaps

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    def sequences(self) -> list[Sequence]:
        """The live sequences: running, waiting in the order of the queue, then draining."""
        draining = [seq for seq in self._live.values() if seq.status is Status.DRAINING]
        return [*self._queues.running, *self._queues.waiting, *draining]

    def known_tokens(self, request_id: str) -> tuple[Int32, Int32]:
        """Prompt and generated tokens of a live request, as far as they have been read."""
        seq = self._by_request_id[request_id]
        return seq.prompt, np.array(seq.outputs, np.int32)

    def add(self, request: Request) -> int:
        """Queue a request.

        Returns:
            The `seq_id` of its sequence.

        Raises:
            ValueError: a live request has the same id; the prompt is empty, holds something other
                than int32 token ids, or leaves no room for an output token; its sibling is not
                live, or has another prompt or salt.
        """
        request_id = request.request_id
        if request_id in self._by_request_id:
            raise ValueError(f"request {request_id!r} is still being served: ids must be unique")
        prompt = checked_prompt(request, self.config)
        sibling = self._sibling(request, prompt)
        if sibling is not None:
            prompt = sibling.prompt
        seq = Sequence(request, prompt, self._next_seq_id, self.max_seq_len)
        self._next_seq_id += 1
        if self._deadlines is not None:
            seq.arrived = self._deadlines.clock()
        if sibling is not None:
            if not sibling.siblings:
                sibling.siblings.append(sibling)
            seq.siblings = sibling.siblings
            seq.siblings.append(seq)
            seq.held = request.beam
        self._live[seq.seq_id] = self._by_request_id[request_id] = seq
        self._queues.wait(seq)
        return seq.seq_id

    def finish(self, request_id: str) -> bool:
        """End a request now, for a reason of the caller's; tokens in flight are thrown away.

        Returns:
            Whether there was such a request.
        """
        seq = self._by_request_id.get(request_id)
        if seq is not None:
            self._end(seq)
        return seq is not None

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as when the model's weights have changed.

        Sequences that run go on with the keys and values they have; these are not shared.
        """
        self.blocks.reset_prefix_cache(self._live.values())

    def schedule(self) -> StepPlan | None:
        """Plan the next step.

        Returns:
            The plan, to be dispatched before anything else is called, and after the transfers of
            `BlockManager.tiers`. None when there is nothing to compute before the next `update` or
            `add`, or before what is being read from the disk is there; or when a sequence that
            found no room beside beams that wait has given way, and the next call plans.

        Raises:
            RuntimeError: two plans are in flight already.
        """
        if len(self._in_flight) >= MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_PLANS_IN_FLIGHT} plans are in flight: update one first")
        step = StepBuilder(self.config)
        running = self._queues.running
        preempted = self._make_way()  # for requests of a higher priority
        preempted += self._schedule_running(step)  # a token each, or more of their prompts
        if preempted:  # there is no room for anybody else
            self._share_out(step)
        else:
            self._admit_waiting(step)
            # Beams that wait for each other hold blocks and are in no step: they give way.
            while step.is_empty and running and not self._in_flight and self._wanting():
                preempted.append(self._preempt_last())
                self._admit_waiting(step)
        self._roster = step.roster(self._roster)
        plan = step.build(self._roster, self.blocks, preempted)
        if plan is not None:
            self._in_flight.append((plan, self._roster.seqs))
            self._drain(step.ending)
        return plan

    def update(self, plan: StepPlan, token_ids: Int32) -> StepUpdate:
        """Take in the tokens that a plan has sampled.

        Args:
            plan: the oldest plan in flight.
            token_ids: int32[plan.num_samples].

        Raises:
            ValueError: another plan has to come first, or the number of tokens is wrong.
        """
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise ValueError("plans are updated once each, in the order in which they were made")
        if token_ids.shape != (plan.num_samples,):
            raise ValueError(f"got tokens of shape {token_ids.shape}, want ({plan.num_samples},)")
        _, seqs = self._in_flight.popleft()
        if self._deadlines is not None:
            self._deadlines.took(
                plan,
                next_began=bool(self._in_flight),
                is_awaited=any(seq.status is not Status.FINISHED for seq in seqs),
            )
        update = take_in(plan, seqs, token_ids.tolist())
        is_caching, is_windowed = self.config.prefix_caching, self.config.window is not None
        size = self.config.block_size
        for index in range(len(seqs)) if is_caching or is_windowed else update.ends:
            seq = seqs[index]
            if index in update.ends:
                self._end(seq)
                continue
            if is_caching and seq.num_known >= (seq.num_indexed + 1) * size:
                self.blocks.index_full_blocks(seq)
            if is_windowed:
                self.blocks.give_up_passed(seq)
        return update

    def choose_beams(self, choices: Iterable[BeamChoice]) -> None:
        """Let beams of one search go on, all at once: each as a copy of one of them, and a token.

        A parent is what it was before any of the choices. What a beam shares with its parent is
        shared by reference; beams without a choice keep waiting.

        Args:
            choices: at most one for each beam; beams and parents wait, and the plans that have
                computed their tokens have been updated.

        Raises:
            ValueError: a beam or a parent is not live, does not wait, or is listed twice as a
                beam; nothing has changed.
        """
        choices = list(choices)
        planned = {seq_id for plan, _ in self._in_flight for seq_id in plan.seq_ids}
        pairs = [
            (self._held(c.request_id, planned), self._held(c.parent_id, planned)) for c in choices
        ]
        if len({seq.seq_id for seq, _ in pairs}) < len(pairs):
            raise ValueError(f"a beam is chosen for twice in {choices}")
        before = [parent.snapshot() for _, parent in pairs]
        shared = [None if seq is parent else self.blocks.share(parent) for seq, parent in pairs]
        for choice, (seq, parent), was, blocks in zip(choices, pairs, before, shared, strict=True):
            if blocks is not None:
                self._go_on_from(seq, was, blocks)
                parent.tail_shared = parent.row != NO_ROW
            seq.outputs.append(choice.token_id)
            seq.num_known += 1
            seq.num_tokens += 1
            seq.held = False

    def _go_on_from(self, seq: Sequence, was: Sequence, blocks: list[int]) -> None:
        """Give a beam the tokens and blocks of another one, which was in the state `was`."""
        if blocks and self.blocks.fork(seq, was, blocks):
            if seq.status is Status.WAITING:
                self._queues.run(seq)
        elif seq.status is Status.RUNNING:  # both compute their tokens again
            self.blocks.free(seq)
            self._queues.wait(seq)
        seq.outputs = was.outputs[:]
        seq.num_known = seq.num_tokens = was.num_known

    def _make_way(self) -> list[Sequence]:
        """Let waiting sequences run in place of strictly less urgent ones; return the latter."""
        preempted: list[Sequence] = []
        running = self._queues.running
        for seq in self._queues.overdue():
            if preempted and urgency(preempted[-1]) < urgency(seq):
                break  # the most urgent of those that made way is next in the queue
            self.blocks.admission.look_on_disk(seq)
            if is_to_wait(seq, self.blocks.admission):
                continue
            while not (self.blocks.num_free_rows and self._admit(seq)):
                if not running or running[-1].request.priority <= seq.request.priority:
                    return preempted
                preempted.append(self._preempt_last())
            self._queues.run(seq)
        return preempted

    def _schedule_running(self, step: StepBuilder) -> list[Sequence]:
        """Plan the running sequences in order; return those preempted for want of blocks."""
        preempted: list[Sequence] = []
        running = self._queues.running
        index = 0
        # Those that only decode are planned in one go, up to one that does not, or has no room.
        while (index := step.add_decodes(running, index, self.blocks)) < len(running):
            seq = running[index]
            if seq.held or (self._deadlines is not None and is_chunk(seq)):
                index += 1
                continue
            count = step.chunk(seq)
            if not count:
                break
            end = seq.num_computed + count
            has_room = end <= seq.capacity and not seq.tail_shared
            if has_room or self.blocks.grow(seq, end):
                step.add(seq, count)
                index += 1
            else:  # the last has not been planned in this step: `running` ends with it
                preempted.append(self._preempt_last())
        return preempted

    def _admit_waiting(self, step: StepBuilder) -> None:
        waiting, in_order = self._queues.waiting, self._deadlines is None
        passed: list[Sequence] = []
        while waiting and self.blocks.num_free_rows:
            seq = waiting[0]
            self.blocks.admission.look_on_disk(seq)
            if is_to_wait(seq, self.blocks.admission):
                passed.append(waiting.popleft())
                continue
            if in_order and not step.chunk(seq):
                break
            if not self._admit(seq):
                self.blocks.admission.expect(seq)
                break
            self._queues.run(seq)
            if in_order:
                step.add(seq, step.chunk(seq))
        waiting.extendleft(reversed(passed))
        self._share_out(step)

    def _share_out(self, step: StepBuilder) -> None:
        if self._deadlines is not None:
            running, ahead = self._queues.running, [plan for plan, _ in self._in_flight]
            self._deadlines.share_out(step, running, ahead, self.blocks)

    def resume(self, seq: Sequence) -> bool:
        """Let a waiting sequence run outside of a plan, if there are blocks for all its tokens."""
        if not self.blocks.num_free_rows or not self.blocks.admit(seq, keep_free=0):
            return False
        self._queues.run(seq)
        return True

    def _admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence blocks, if enough of them are free."""
        keep_free = self._watermark if self._queues.running else 0
        if seq.saved is not None:
            return self.blocks.swap_in(seq, keep_free=keep_free)
        source = source_of(seq, self.blocks.admission)
        return self.blocks.admit(seq, keep_free=keep_free, source=source)

    def _wanting(self) -> bool:
        """Whether a waiting sequence has something to compute."""
        return any(not is_to_wait(seq, self.blocks.admission) for seq in self._queues.waiting)

    def _preempt_last(self) -> Sequence:
        """Take the blocks of the least urgent running sequence, the last to arrive of equals."""
        seq = self._queues.running[-1]
        if self._is_worth_swapping(seq) and self.blocks.swap_out(seq):
            self._num_swaps += 1
        else:
            self.blocks.free(seq)
        self._queues.wait(seq)
        self._num_preemptions += 1
        return seq

    def _is_worth_swapping(self, seq: Sequence) -> bool:
        """Whether a sequence that loses its blocks should rather keep what it has computed."""
        if self.config.preemption != "auto" or seq.request.beam:  # a beam may be exchanged yet
            return self.config.preemption == "swap" and not seq.request.beam
        if (cost := self.swap_cost) is None:
            return False
        return cost.swap_s(len(seq.blocks)) < cost.recompute_s(seq.num_computed)

    def _drain(self, seqs: list[Sequence]) -> None:
        """Free the blocks of sequences that have planned all they need, for the next plan.

        A block that is filled up by a token still on the device is not kept as a prefix.
        """
        for seq in seqs:
            self.blocks.free(seq)
            self._queues.leave(seq, Status.DRAINING)

    def _end(self, seq: Sequence) -> None:
        self._queues.leave(seq, Status.FINISHED)
        self.blocks.free(seq)
        if seq.siblings:
            seq.siblings.remove(seq)
        del self._live[seq.seq_id]
        del self._by_request_id[seq.request.request_id]
        if not self._live:  # what is in flight is for nobody, and may stay there for long
            self._roster = NOBODY
            self._in_flight = deque((plan, []) for plan, _ in self._in_flight)

    def _sibling(self, request: Request, prompt: Int32) -> Sequence | None:
        """The live sibling of a request that names one."""
        if request.sibling_of is None:
            return None
        sibling = self._by_request_id.get(request.sibling_of)
        check_siblings(request, prompt, sibling)
        return sibling

    def _held(self, request_id: str, planned: set[int]) -> Sequence:
        """The beam of this name, which waits to be chosen and is not among those in flight."""
        seq = self._by_request_id.get(request_id)
        if seq is None or not seq.held or seq.seq_id in planned:
            raise ValueError(f"{request_id!r} is no beam that waits to be chosen")
        return seq
