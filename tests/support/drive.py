"""Runs the scheduler without a model: a device that checks what it is told to read.

`HashModel` stands for the device. Its "KV cache" keeps for every slot which token at which
position was written there. Attention reads a sequence through its block table, must find the
positions 0, 1, 2 ... there, and the next token is a hash of all the tokens it found: a block that
was overwritten, mixed up or never written gives another token than `expected_tokens`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np

from scheduler import (
    BeamChoice,
    FinishReason,
    Request,
    ScheduledSeq,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepUpdate,
    StopRules,
    invariants,
)
from scheduler.prefix_index import PrefixIndex
from scheduler.sequence import Status

VOCAB = 997
_WEIGHTS = np.random.default_rng(0).integers(1, 2**62, size=1 << 16, dtype=np.uint64)


class SeqUpdate(NamedTuple):
    """What a step has brought to one sequence.

    Attributes:
        seq_id: identity of the sequence.
        request_id: of its request.
        new_token_ids: tokens to append to the output, a stop token included.
        finish_reason: None while the sequence goes on.
        stop_token_id: the token that ended it, if one did.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
    """

    seq_id: int
    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None
    num_cached_tokens: int


def seq_updates(update: StepUpdate) -> list[SeqUpdate]:
    """The columns of an update put together for each of its sequences, beams last."""
    news = [(at, (token,)) for at, token in zip(update.indices, update.token_ids, strict=True)]
    return [
        SeqUpdate(
            update.plan.seq_ids[at],
            update.plan.request_ids[at],
            tokens,
            *update.ends.get(at, (None, None)),
            update.num_cached_tokens[at],
        )
        for at, tokens in [*news, *((at, ()) for at in update.beams)]
    ]


def next_token(tokens: np.ndarray, request_id: str) -> int:
    """The token that follows `tokens`: a hash of all of them and their order.

    Samples of one prompt, named `prompt#0`, `prompt#1` ..., differ by their number.
    """
    mixed = tokens.astype(np.uint64) + np.uint64(1)
    sample = int(request_id.partition("#")[2] or 0)
    return (int((mixed * _WEIGHTS[: len(tokens)]).sum() >> np.uint64(32)) + 7 * sample) % VOCAB


def request(
    request_id: str, prompt: int | Sequence[int], max_tokens: int = 8, **options: object
) -> Request:
    """A request; a number as the prompt stands for that many tokens made from the id."""
    if isinstance(prompt, int):
        seed = [ord(char) for char in request_id.partition("#")[0]]
        prompt = np.random.default_rng(seed).integers(0, VOCAB, size=prompt).tolist()
    rules = {
        name: options.pop(name) for name in ("min_tokens", "stop_token_ids") if name in options
    }
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        stop=StopRules(max_tokens=max_tokens, **rules),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def samples(name: str, count: int, prompt: int | Sequence[int], *args: int) -> list[Request]:
    """Sibling requests for `count` samples of one prompt."""
    first = f"{name}#0"
    others = [
        request(f"{name}#{index}", prompt, *args, sibling_of=first) for index in range(1, count)
    ]
    return [request(first, prompt, *args), *others]


def expected_tokens(
    request: Request, max_seq_len: int, window: int | None = None
) -> tuple[list[int], FinishReason]:
    """Output and end of a request served alone by a machine without limits but `max_seq_len`."""
    tokens = list(request.prompt_token_ids)
    outputs: list[int] = []
    rules = request.stop
    while True:
        token = next_token(np.array(tokens[-(window or 0) :]), request.request_id)
        tokens.append(token)
        outputs.append(token)
        if token in rules.stop_token_ids and len(outputs) > rules.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == rules.max_tokens or len(tokens) == max_seq_len:
            return outputs, FinishReason.LENGTH


def random_prompt(
    rng: np.random.Generator, prompts: list[list[int]], longest: int, own_share: float
) -> list[int]:
    """The beginning of one of `prompts`; with a chance of `own_share` it ends in tokens of its own.

    Shorter than `longest`.
    """
    length = int(rng.integers(1, longest))
    base = prompts[rng.integers(len(prompts))][:length]
    own_len = length - len(base) if rng.random() < own_share else 0
    return base + rng.integers(VOCAB, size=own_len).tolist()


@dataclass
class BeamSearch:
    """The beams of one prompt, which are chosen at random whenever all that compute have reported.

    Attributes:
        tokens: of each live beam, by its request id; None before it is chosen first.
        last: where each search ends, in tokens.
        reported: the beams that wait.
    """

    tokens: dict[str, list[int] | None]
    last: int
    rng: np.random.Generator
    reported: set[str] = field(default_factory=set)

    def choose(self, scheduler: Scheduler) -> list[str]:
        """Choose for each beam; the ids of those that have ended."""
        parents = sorted(self.reported)
        self.reported.clear()
        if any(len(self.tokens[name] or ()) >= self.last for name in parents):
            return list(self.tokens)
        choices: list[BeamChoice] = []
        for name in self.tokens:
            own = name in parents and self.rng.random() < 0.5
            parent = name if own else parents[self.rng.integers(len(parents))]
            choices.append(BeamChoice(name, parent, int(self.rng.integers(VOCAB))))
        before = {name: self.tokens[name] for name in parents}
        scheduler.choose_beams(choices)
        for name, parent, token in choices:
            self.tokens[name] = [*(before[parent] or ()), token]
        return []


class HashModel:
    """The device: executes plans in order, with its own memory of the last sampled tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._window = config.window or config.max_model_len
        slots = config.num_blocks * config.block_size
        self._tokens = np.full(slots, -1, np.int64)
        self._positions = np.full(slots, -1, np.int64)
        self._last_samples = np.empty(0, np.int32)

    def run(self, plan: StepPlan) -> np.ndarray:
        """Copy blocks, write the step's tokens, read every context, and sample.

        Returns:
            int32[num_samples].
        """
        self._copy(plan.copies)
        tokens = plan.token_ids.copy()
        query_start = plan.query_start()
        fed = plan.feed_rows >= 0
        tokens[query_start[1:][fed] - 1] = self._last_samples[plan.feed_rows[fed]]
        slots = plan.slot_mapping(self._block_size)
        assert len(set(slots.tolist())) == len(slots), "two tokens are written to one slot"
        assert (slots >= self._block_size).all(), "data is written to the null block"
        self._tokens[slots] = tokens
        self._positions[slots] = plan.positions()
        samples = [token for row in range(len(plan.seqs)) for token in self._read(plan, row)]
        self._last_samples = np.array(samples, np.int32)
        return self._last_samples.copy()

    def _copy(self, copies: np.ndarray) -> None:
        sources, destinations = copies.T
        assert len(set(destinations.tolist())) == len(destinations), "two copies to one block"
        assert copies.size == 0 or copies.min() > 0, "the null block is copied"
        for slots in (self._tokens, self._positions):
            blocks = slots.reshape(-1, self._block_size)
            blocks[destinations] = blocks[sources]

    def check_content(self, index: PrefixIndex) -> None:
        """Whatever is offered as a prefix has been written, at the positions of a full block."""
        size = self._block_size
        for block, tokens in index.contents().items():
            slots = slice(block * size, (block + 1) * size)
            assert self._tokens[slots].astype(np.int32).tobytes() == tokens
            first = self._positions[slots][0]
            assert first % size == 0
            assert np.array_equal(self._positions[slots], np.arange(first, first + size))

    def _read(self, plan: StepPlan, row: int) -> list[int]:
        planned = plan.seqs[row]
        end = planned.start + planned.num_tokens
        first = max(planned.start - self._window + 1, 0)
        positions = np.arange(first, end)
        table = plan.block_tables[row]
        slots = table[positions // self._block_size] * self._block_size
        slots += (positions % self._block_size).astype(np.int32)
        assert np.array_equal(self._positions[slots], positions), (
            f"{planned} reads positions that are not its own"
        )
        context = self._tokens[slots]
        return [
            next_token(context[: end - first - back][-self._window :], planned.request_id)
            for back in range(planned.num_samples - 1, -1, -1)
        ]


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """A plan keeps inside the budgets and agrees with itself."""
    seqs = plan.seqs
    assert 1 <= len(seqs) <= config.max_num_seqs
    assert len({planned.seq_id for planned in seqs}) == len(seqs)
    assert plan.num_tokens == sum(planned.num_tokens for planned in seqs) == len(plan.token_ids)
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert plan.num_samples == sum(planned.num_samples for planned in seqs)
    assert plan.num_samples <= config.max_num_seqs
    assert plan.block_tables.shape == (len(seqs), config.max_blocks_per_seq)
    assert not {planned.seq_id for planned in seqs} & set(plan.preempted)
    is_decode = [planned.num_tokens == planned.num_samples == 1 for planned in seqs]
    assert is_decode == [True] * plan.num_decodes + [False] * (len(seqs) - plan.num_decodes)
    rows = 0
    for planned in seqs:
        assert 0 <= planned.num_samples <= planned.num_tokens
        assert planned.num_tokens >= 1
        if planned.num_tokens > 1 and config.max_prefill_chunk is not None:
            assert planned.num_tokens <= config.max_prefill_chunk
        rows += planned.num_samples
        assert planned.sample_row in (-1, rows - 1)
    for column in (
        plan.starts,
        plan.counts,
        plan.sample_counts,
        plan.feed_rows,
        plan.drawn_rows,
    ):
        assert column.dtype == np.int32 and column.shape == (len(seqs),)


@dataclass
class Driver:
    """A scheduler, its device, and what came out; checks everything after every step.

    Attributes:
        config: of the scheduler.
        pipelined: whether each plan is made before the tokens of the one before it are read.
        num_priorities: if more than 1, requests get one of so many priorities, by their ids.
        clock: of the scheduler.
        ends: why sequences have ended; None if they were ended from outside.
    """

    config: SchedulerConfig
    pipelined: bool = True
    check: bool = True
    num_priorities: int = 1
    clock: Callable[[], float] = time.monotonic
    plans: list[StepPlan] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason | None] = field(default_factory=dict)
    end_order: list[str] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    last_updates: dict[int, SeqUpdate] = field(default_factory=dict)
    searches: dict[str, BeamSearch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.clock)
        self.model = HashModel(self.config)
        self._unread: deque[tuple[StepPlan, np.ndarray]] = deque()

    def add(self, *requests: Request) -> list[int]:
        """Queue requests; their sequence ids."""
        if self.num_priorities > 1:
            requests = tuple(
                dataclasses.replace(r, priority=crc32(r.request_id.encode()) % self.num_priorities)
                for r in requests
            )
        seq_ids = [self.scheduler.add(request) for request in requests]
        self.requests |= dict(zip(seq_ids, requests, strict=True))
        self.outputs |= {seq_id: [] for seq_id in seq_ids}
        return seq_ids

    def add_beams(
        self, name: str, width: int, prompt: int | Sequence[int], num_tokens: int, seed: int
    ) -> None:
        """Queue a beam search that chooses at random until a beam has `num_tokens` tokens."""
        beams = [dataclasses.replace(r, beam=True) for r in samples(name, width, prompt, 1000)]
        self.add(*beams)
        search = BeamSearch(
            {beam.request_id: None for beam in beams}, num_tokens, np.random.default_rng(seed)
        )
        self.searches |= {beam.request_id: search for beam in beams}

    def finish(self, request_id: str) -> None:
        """End a request from outside, if it is live; all beams of a search that has not begun."""
        search = self.searches.pop(request_id, None)
        if search is not None:
            begun = search.tokens.pop(request_id) is not None
            search.reported.discard(request_id)
            for other in [] if begun else list(search.tokens):
                self.finish(other)
        live = {s.request.request_id: s.seq_id for s in self.scheduler.sequences()}
        assert self.scheduler.finish(request_id) == (request_id in live)
        if request_id in live:
            self._note_end(live[request_id], None)
        if search is not None:  # which may have waited for nobody but this one
            self._choose(search)
        self._check()

    def step(self) -> StepPlan | None:
        """One turn of the engine's loop; returns the plan that was made."""
        wanting = [s for s in self.scheduler.sequences() if s.status is not Status.DRAINING]
        held_blocks = any(s.held and s.blocks for s in wanting)
        wanting = [s for s in wanting if not s.held]
        before = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        if held_blocks and (self._unread or self.scheduler.num_preemptions > before):
            pass  # what waits for blocks may have to wait for beams to be chosen, or give way
        else:
            assert (plan is None) == (not wanting), "there is work exactly when one wants it"
        if plan is not None:
            planned = {s.seq_id for s in plan.seqs}
            first = min(wanting, key=lambda s: s.request.priority)
            may_wait = held_blocks or self.config.ttft_target_s is not None
            assert first.seq_id in planned or may_wait, "the first makes no progress"
            check_plan(plan, self.config)
            self.plans.append(plan)
            self._unread.append((plan, self.model.run(plan)))
        self._check()
        self._read_back(1 if self.pipelined and plan is not None else 0)
        return plan

    def _read_back(self, keep: int) -> None:
        """Take in the tokens of all plans but the newest `keep`; beams go on."""
        while len(self._unread) > keep:
            unread, tokens = self._unread.popleft()
            updates = seq_updates(self.scheduler.update(unread, tokens))
            rows = {s.seq_id: s.sample_row for s in unread.seqs}
            self._take_in([u for u in updates if u.request_id not in self.searches])
            for update in updates:
                if update.request_id in self.searches:
                    self._report(update, int(tokens[rows[update.seq_id]]))
            for search in {id(s): s for s in self.searches.values()}.values():
                self._choose(search)
            self._check()

    def _report(self, update: SeqUpdate, token: int) -> None:
        """A beam has read its own tokens, and no others."""
        search, name = self.searches[update.request_id], update.request_id
        prompt = self.requests[update.seq_id].prompt_token_ids
        assert not update.new_token_ids and update.finish_reason is None
        tokens = np.array([*prompt, *(search.tokens[name] or ())])
        assert token == next_token(tokens[-(self.config.window or 0) :], name)
        search.reported.add(name)

    def _choose(self, search: BeamSearch) -> None:
        """Let a search go on if none of its beams has anything left to compute."""
        computing = {s.request_id for plan, _ in self._unread for s in plan.seqs}
        computing |= {s.request.request_id for s in self.scheduler.sequences() if not s.held}
        if search.reported and not computing & set(search.tokens):
            for name in search.choose(self.scheduler):
                self.finish(name)

    def run(self, max_steps: int = 100_000) -> int:
        """Step until nothing is left to do; how many steps made a plan.

        With one seat and one token a step, beams that take turns come to more than ten thousand.
        """
        for steps in range(max_steps):
            if self.step() is None and not self.scheduler.has_unfinished():
                return steps
        raise AssertionError(f"not finished after {max_steps} steps")

    def verify(self) -> None:
        """Every ended request has exactly the tokens and the end that it has alone."""
        shares: dict[int, list[ScheduledSeq]] = {seq_id: [] for seq_id in self.requests}
        for share in (share for plan in self.plans for share in plan.seqs):
            shares[share.seq_id].append(share)
        for seq_id, reason in self.ends.items():
            if self.requests[seq_id].beam:
                continue  # checked at every step
            tokens, alone = expected_tokens(
                self.requests[seq_id], self.scheduler.max_seq_len, self.config.window
            )
            got = self.outputs[seq_id]
            if reason is None:
                assert got == tokens[: len(got)]
            else:
                assert (got, reason) == (tokens, alone), self.requests[seq_id].request_id
                self._verify_scored(seq_id, shares[seq_id])

    def _verify_scored(self, seq_id: int, planned: list[ScheduledSeq]) -> None:
        """Each prompt token has had its sample row once, if that was asked for."""
        request = self.requests[seq_id]
        length = len(request.prompt_token_ids)
        ends = [(s.start + s.num_tokens, s.num_samples) for s in planned]
        rows = [row for end, count in ends for row in range(end - count, end) if row < length]
        assert rows == list(range(0 if request.prompt_logprobs else length - 1, length))

    def _take_in(self, updates: list[SeqUpdate]) -> None:
        for update in updates:
            assert update.seq_id not in self.ends, "a token after the end"
            self.outputs[update.seq_id] += update.new_token_ids
            self.last_updates[update.seq_id] = update
            if update.finish_reason is not None:
                self._note_end(update.seq_id, update.finish_reason)

    def _note_end(self, seq_id: int, reason: FinishReason | None) -> None:
        assert seq_id not in self.ends, "a second end"
        self.ends[seq_id] = reason
        self.end_order.append(self.requests[seq_id].request_id)

    def _check(self) -> None:
        if self.check:
            invariants.check(self.scheduler)
            self.model.check_content(self.scheduler.blocks.pool.index)
