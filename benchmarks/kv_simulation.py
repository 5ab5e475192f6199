"""Simulates KV memory under a load: how much is wasted, where blocks lie, which prefixes are found.

No model and no clock: a step is one token of every running sequence. Sequences are admitted and
preempted by the scheduler's rules; `tests/benchmarks` holds the simulation against the scheduler.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.workloads import PIECE, RequestShape
from scheduler import Request, SchedulerConfig, StopRules
from scheduler.block_manager import BlockManager
from scheduler.block_map import external_fragmentation
from scheduler.free_lists import FreeList
from scheduler.sequence import Sequence as SchedulerSequence

Lengths = np.ndarray
Need = Callable[[Lengths, Lengths], Lengths]


def paged(block_size: int) -> Need:
    """Memory of a sequence, in units of one block: as many blocks as its tokens fill."""
    return lambda length, _: -(-length // block_size)


def reserved(max_len: int) -> Need:
    """The same where every sequence has room for the longest one, in units of one token."""
    return lambda length, _: np.full_like(length, max_len)


def reserved_exactly(length: Lengths, end: Lengths) -> Lengths:
    """The same where the length of the answer is known before it is generated: a bound."""
    return np.maximum(length, end)


@dataclass
class Load:
    """What came of a simulation; averages are over the steps with requests waiting.

    Attributes:
        mean_running: sequences at the same time.
        waste: share of the memory given to sequences that holds no token.
        utilisation: share of all memory that holds tokens.
        preemptions: times a sequence lost its memory.
        steps: steps of the whole simulation.
        held: units given to sequences after each step's admissions.
        operations: (sequence, units taken) in order; 0 units give everything back.
    """

    mean_running: float = 0.0
    waste: float = 0.0
    utilisation: float = 0.0
    preemptions: int = 0
    steps: int = 0
    held: list[int] = field(default_factory=list)
    operations: list[tuple[int, int]] = field(default_factory=list)


def simulate(
    shapes: Sequence[RequestShape], need: Need, *, units: int, unit_tokens: int, max_seqs: int
) -> Load:
    """Serve requests that are all there at the start.

    Args:
        shapes: the requests, oldest first.
        need: units that a sequence needs, of its tokens and its last length.
        units: size of the memory.
        unit_tokens: tokens of a unit.
        max_seqs: most running sequences.
    """
    result, watermark, free = Load(), (units + 1) // 100, units
    ends = np.array([shape.prompt_len + shape.output_len - 1 for shape in shapes])
    known = np.array([shape.prompt_len for shape in shapes])  # tokens to compute when admitted
    waiting = deque(range(len(shapes)))
    running = np.zeros(0, np.int64)
    length, held = np.zeros(0, np.int64), np.zeros(0, np.int64)
    totals = np.zeros(4)  # steps, sequences, tokens, tokens that the units hold
    while waiting or len(running):
        wanted = need(length + 1, ends[running])
        kept = len(running)
        while (wanted[:kept] - held[:kept]).sum() > free:
            kept -= 1
            free += int(held[kept])
            known[running[kept]] = length[kept] + 1
            waiting.appendleft(int(running[kept]))
            result.operations.append((int(running[kept]), 0))
        result.preemptions += len(running) - kept
        may_admit = kept == len(running)
        running, length = running[:kept], length[:kept] + 1
        for at in np.flatnonzero(wanted[:kept] > held[:kept]).tolist():
            result.operations.append((int(running[at]), int(wanted[at] - held[at])))
        free -= int((wanted[:kept] - held[:kept]).sum())
        held = wanted[:kept]
        admitted: list[tuple[int, int, int]] = []
        while may_admit and waiting and kept + len(admitted) < max_seqs:
            seq = waiting[0]
            units_now = int(need(known[seq : seq + 1], ends[seq : seq + 1])[0])
            if units_now + (watermark if kept + len(admitted) else 0) > free:
                break
            waiting.popleft()
            free -= units_now
            admitted.append((seq, int(known[seq]), units_now))
            result.operations.append((seq, units_now))
        if admitted:
            columns = np.array(admitted).T
            running, length, held = (
                np.concatenate([old, new])
                for old, new in zip((running, length, held), columns, strict=True)
            )
        assert len(running), f"request {waiting[0]} does not fit in {units} units"
        result.steps += 1
        result.held.append(int(held.sum()))
        if waiting:
            totals += 1, len(running), length.sum(), held.sum() * unit_tokens
        done = length >= ends[running]
        result.operations += [(int(seq), 0) for seq in running[done]]
        free += int(held[done].sum())
        running, length, held = running[~done], length[~done], held[~done]
    steps, sequences, tokens, room = totals
    if steps:
        result.mean_running = sequences / steps
        result.waste = 1.0 - tokens / room
        result.utilisation = tokens / steps / (units * unit_tokens)
    return result


def timed_operations(
    shapes: Sequence[RequestShape], *, units: int, block_size: int, token_s: float
) -> list[tuple[int, int]]:
    """The same operations where requests come at the times of their trace.

    Args:
        shapes: the requests, oldest first.
        units: blocks of the pool; a request that will not find room to its end is left out.
        block_size: tokens per block.
        token_s: seconds per token of an answer.
    """
    operations: list[tuple[int, int]] = []
    events: list[tuple[float, int, int]] = []  # when, which request, blocks that it has
    promised = 0

    def next_event(number: int, blocks: int) -> None:
        shape = shapes[number]
        token = blocks * block_size + 1 - shape.prompt_len
        token = token if token < shape.output_len else shape.output_len
        heapq.heappush(events, (shape.arrival_s + token * token_s, number, blocks))

    def total(shape: RequestShape) -> int:
        return -(-(shape.prompt_len + shape.output_len - 1) // block_size)

    def advance(until: float) -> None:
        nonlocal promised
        while events and events[0][0] <= until:
            _, number, blocks = heapq.heappop(events)
            ends = blocks == total(shapes[number])
            operations.append((number, 0 if ends else 1))
            if ends:
                promised -= blocks
            else:
                next_event(number, blocks + 1)

    for number, shape in enumerate(shapes):
        advance(shape.arrival_s)
        if promised + total(shape) <= units:
            promised += total(shape)
            blocks = -(-shape.prompt_len // block_size)
            operations.append((number, blocks))
            next_event(number, blocks)
    advance(float("inf"))
    return operations


@dataclass(frozen=True)
class Layout:
    """How the blocks of a simulation lay, averaged over samples.

    External fragmentation has more than one definition (`scheduler.free_lists`): the share of all
    memory that is lost to who wants runs (Randell, 1969), the same share of the free memory (the
    index of unusable free space of Gorman and Whitcroft, 2006), and the share of the free memory
    outside the longest run. Nothing is ever refused for any of them.

    Attributes:
        mean_run: blocks per run of neighbours in the tables of running sequences.
        runs_per_seq: runs of a sequence, each of which is one copy when it is moved.
        free_share: share of the blocks that are free.
        external_fragmentation: share of the pool that is free in runs shorter than growth wants.
        unusable_16: share of the free blocks in runs of fewer than 16.
        unusable_64: likewise of fewer than 64.
        unusable_for_prompts: likewise of fewer than a prompt takes, averaged over all prompts for
            which enough blocks are free.
        prompts_without_run: share of these prompts that no single run holds.
        outside_longest_run: share of the free blocks outside the longest free run.
    """

    mean_run: float
    runs_per_seq: float
    free_share: float
    external_fragmentation: float
    unusable_16: float
    unusable_64: float
    unusable_for_prompts: float
    prompts_without_run: float
    outside_longest_run: float


def replay_seconds(operations: Sequence[tuple[int, int]], free: FreeList) -> float:
    """CPU seconds of a free list, and of keeping the tables, for what a simulation asked of it."""
    tables: dict[int, list[int]] = {}
    start = time.process_time()
    for seq, units in operations:
        if units:
            table = tables.setdefault(seq, [])
            table += free.take(units, table[-1] if table else None)
        else:
            free.give(tables.pop(seq))
    return time.process_time() - start


def replay_layout(
    operations: Sequence[tuple[int, int]], free: FreeList, num_blocks: int, samples: int = 200
) -> Layout:
    """Where the blocks lie meanwhile, at `samples` moments after the pool has filled up."""
    tables: dict[int, list[int]] = {}
    prompts = np.array(list(_first_takes(operations)))
    rows: list[list[float]] = []
    every = max(len(operations) // samples, 1)
    for at, (seq, units) in enumerate(operations):
        if units:
            table = tables.setdefault(seq, [])
            table += free.take(units, table[-1] if table else None)
        else:
            free.give(tables.pop(seq))
        if at % every == 0 and at > len(operations) // 10 and tables and len(free):
            used = np.ones(num_blocks, bool)
            used[free.blocks()] = False
            lengths = np.sort(_run_lengths(np.flatnonzero(~used)))
            runs = sum(len(_run_lengths(np.array(table))) for table in tables.values())
            blocks = sum(map(len, tables.values()))
            fitting = prompts[prompts <= len(free)]
            rows.append(
                [
                    blocks / runs,
                    runs / len(tables),
                    len(free) / num_blocks,
                    external_fragmentation(used[1:]),
                    *unusable(lengths, np.array([16, 64])),
                    unusable(lengths, fitting).mean() if len(fitting) else 0.0,
                    (fitting > lengths[-1]).mean() if len(fitting) else 0.0,
                    1.0 - lengths[-1] / len(free),
                ]
            )
    return Layout(*np.mean(rows, axis=0).tolist())


def _first_takes(operations: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Units that each sequence takes at once when it has none: those of its prompt."""
    running: set[int] = set()
    for seq, units in operations:
        if not units:
            running.remove(seq)
        elif seq not in running:
            running.add(seq)
            yield units


def unusable(lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Share of the free memory in runs shorter than each of `wanted`, 0 to 1.

    Source: Gorman and Whitcroft, The What, The Why and the Where To of Anti-Fragmentation, 2006.

    Args:
        lengths: of the free runs, ascending.
        wanted: lengths of runs.
    """
    below = np.concatenate([[0], np.cumsum(lengths)])
    return below[np.searchsorted(lengths, wanted)] / below[-1]


def _run_lengths(blocks: np.ndarray) -> np.ndarray:
    """Lengths of the runs of ascending neighbours."""
    ends = np.flatnonzero(np.diff(blocks, append=-2) != 1)
    return np.diff(ends, prepend=-1)


def prompt_tokens(shape: RequestShape) -> np.ndarray:
    """Tokens that agree between prompts exactly as far as their pieces do, int32[prompt_len]."""
    starts = np.array(shape.pieces, np.int32) * PIECE
    return (starts[:, None] + np.arange(PIECE, dtype=np.int32)).ravel()[: shape.prompt_len]


def found_by_the_block_manager(
    shapes: Sequence[RequestShape], *, num_blocks: int, block_size: int, token_s: float
) -> tuple[int, int]:
    """Prompt tokens that prefix caching finds when requests come at the times of the trace.

    A request holds its blocks for `token_s` times its output; one that does not fit waits until
    the next one ends.

    Returns:
        Tokens found, and blocks evicted.
    """
    longest = max(shape.prompt_len + shape.output_len for shape in shapes) + 1
    config = SchedulerConfig(
        num_blocks=num_blocks, max_model_len=longest, block_size=block_size, max_num_seqs=1024
    )
    manager = BlockManager(config)
    live: list[tuple[float, int, SchedulerSequence]] = []
    found, fresh, now = 0, np.iinfo(np.int32).max, 0.0
    for number, shape in enumerate(shapes):
        now = max(now, shape.arrival_s)
        while live and live[0][0] <= now:
            manager.free(heapq.heappop(live)[2])
        tokens = prompt_tokens(shape)
        rules = StopRules(max_tokens=shape.output_len)
        request = Request(request_id=str(number), prompt_token_ids=tokens, stop=rules)
        seq = SchedulerSequence(request, tokens, number, longest)
        total = shape.prompt_len + shape.output_len
        while not (manager.num_free_rows and _admit(manager, seq, total)):
            assert live, f"request {number} of {total} tokens does not fit"
            now = max(now, live[0][0])
            manager.free(heapq.heappop(live)[2])
        found += seq.num_cached_tokens or 0
        # Answers are tokens that nobody asks for again; they take room in the cache, too.
        seq.outputs.extend(range(fresh - shape.output_len, fresh))
        fresh -= shape.output_len
        seq.num_known = seq.num_computed = total
        manager.index_full_blocks(seq)
        heapq.heappush(live, (now + shape.output_len * token_s, number, seq))
    return found, manager.pool.num_evicted


def _admit(manager: BlockManager, seq: SchedulerSequence, total: int) -> bool:
    """Give a sequence the blocks of its prompt and its whole answer."""
    if not manager.admit(seq, keep_free=0):
        return False
    if manager.grow(seq, total):
        return True
    seq.num_cached_tokens = None
    manager.free(seq)
    return False


def findable(shapes: Sequence[RequestShape], block_size: int) -> int:
    """Prompt tokens in full blocks that an earlier prompt began with: what no cache can exceed."""
    seen: set[int] = set()
    return sum(
        _usable(_hit(shape, seen.__contains__, seen.update), shape, block_size) for shape in shapes
    )


def found_by_lru(shapes: Sequence[RequestShape], pieces: int, block_size: int) -> int:
    """The same with room for so many pieces, the least recently used to be evicted first."""
    held: OrderedDict[int, None] = OrderedDict()

    def keep(ids: Sequence[int]) -> None:
        for piece in reversed(ids):  # the end of a prefix goes before its beginning
            held.pop(piece, None)
            held[piece] = None
        while len(held) > pieces:
            held.popitem(last=False)

    return sum(_usable(_hit(shape, held.__contains__, keep), shape, block_size) for shape in shapes)


def found_by_belady(shapes: Sequence[RequestShape], pieces: int, block_size: int) -> int:
    """The same for a cache that knows the future, and evicts what is needed last (Belady, 1966)."""
    uses: dict[int, deque[int]] = {}
    for number, shape in enumerate(shapes):
        for piece in shape.pieces:
            uses.setdefault(piece, deque()).append(number)
    held: dict[int, int] = {}  # next use of what is held
    last_first: list[tuple[int, int, int]] = []
    found = 0
    for shape in shapes:

        def keep(ids: Sequence[int]) -> None:
            for depth, piece in enumerate(ids):
                uses[piece].popleft()
                held[piece] = uses[piece][0] if uses[piece] else len(shapes)
                heapq.heappush(last_first, (-held[piece], -depth, piece))
            while len(held) > pieces:
                next_use, _, piece = heapq.heappop(last_first)
                if held.get(piece) == -next_use:
                    del held[piece]

        found += _usable(_hit(shape, held.__contains__, keep), shape, block_size)
    return found


def _hit(
    shape: RequestShape,
    has: Callable[[int], bool],
    keep: Callable[[Sequence[int]], None],
) -> int:
    """Leading tokens of a prompt whose pieces are there; all of its pieces are kept then."""
    hits = next((at for at, piece in enumerate(shape.pieces) if not has(piece)), len(shape.pieces))
    keep(shape.pieces)
    return min(hits * PIECE, shape.prompt_len)


def _usable(hit: int, shape: RequestShape, block_size: int) -> int:
    """In full blocks, and without the last token, which is always computed."""
    return min(hit, shape.prompt_len - 1) // block_size * block_size
