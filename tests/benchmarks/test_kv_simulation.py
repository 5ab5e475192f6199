"""The simulation of KV memory beside the scheduler, and beside caches small enough to search."""

import itertools

import numpy as np
import pytest

from benchmarks import kv_simulation as sim
from benchmarks.workloads import PIECE, RequestShape
from scheduler import SchedulerConfig
from scheduler.free_lists import BuddyFreeList, StackFreeList
from tests.support.drive import Driver, request


def shapes_of(seed: int, count: int) -> list[RequestShape]:
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(1, 150, count), rng.integers(1, 80, count), strict=True)
    return [RequestShape(int(prompt), int(output), 0.0) for prompt, output in lengths]


@pytest.mark.parametrize("num_blocks", [16, 40, 300])
@pytest.mark.parametrize("max_seqs", [3, 20])
def test_it_admits_and_preempts_as_the_scheduler_does(num_blocks: int, max_seqs: int):
    shapes = shapes_of(num_blocks, 40)
    config = SchedulerConfig(
        num_blocks=num_blocks + 1,
        max_model_len=300,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=100_000,
        prefix_caching=False,
    )
    driver = Driver(config, pipelined=False, check=False)
    for number, shape in enumerate(shapes):
        driver.add(request(f"r{number}", shape.prompt_len, shape.output_len))
    held: list[int] = []
    schedule = driver.scheduler.schedule

    def spy():
        blocks = driver.scheduler.blocks
        drain, driver.scheduler._drain = (
            driver.scheduler._drain,
            lambda ending: (
                held.append(blocks.pool.num_used),
                drain(ending),
            ),
        )
        plan = schedule()
        driver.scheduler._drain = drain
        return plan

    driver.scheduler.schedule = spy  # type: ignore[method-assign]
    driver.run()
    load = sim.simulate(shapes, sim.paged(16), units=num_blocks, unit_tokens=16, max_seqs=max_seqs)
    assert load.held == held
    assert load.preemptions == driver.scheduler.num_preemptions
    assert load.preemptions > 0 or num_blocks == 300 or max_seqs == 3


def test_reservation_counts_room_that_nobody_uses():
    shapes = [RequestShape(10, 11, 0.0)] * 4
    load = sim.simulate(shapes, sim.reserved(40), units=80, unit_tokens=1, max_seqs=99)
    # Two at a time, each with 10 to 20 tokens in room for 40; the last two wait for nobody.
    assert load.mean_running == 2 and load.steps == 22
    assert load.waste == pytest.approx(1 - 15 / 40)
    exact = sim.simulate(shapes, sim.reserved_exactly, units=80, unit_tokens=1, max_seqs=99)
    assert exact.steps == 11


def test_everything_that_is_taken_is_given_back():
    load = sim.simulate(shapes_of(1, 60), sim.paged(16), units=40, unit_tokens=16, max_seqs=30)
    for kind in (StackFreeList, BuddyFreeList):
        free = kind(1, 41)
        assert sim.replay_seconds(load.operations, free) >= 0
        assert sorted(free.blocks()) == list(range(1, 41))
        layout = sim.replay_layout(load.operations, kind(1, 41), 41)
        assert 1 <= layout.mean_run <= 40 and 0 <= layout.outside_longest_run < 1
        assert layout.runs_per_seq >= 1


def test_free_memory_is_unusable_in_runs_shorter_than_wanted():
    """By hand: runs of 1, 2, 5 and 12 of 20 free blocks."""
    got = sim.unusable(np.array([1, 2, 5, 12]), np.array([1, 2, 3, 5, 6, 12, 13]))
    np.testing.assert_allclose(got, [0.0, 0.05, 0.15, 0.15, 0.4, 0.4, 1.0])


def test_fragmentation_is_seen_from_the_prompts_of_the_load():
    """By hand: of blocks 1 to 12, prompts of 4, 2, 4 and 2 take all; the two short ones end.

    Looked at with 7 to 12 free, with 11 and 12, with 5 and 6, and with all four of these.
    """
    operations = [(0, 4), (1, 2), (2, 4), (3, 2), (1, 0), (3, 0)]
    layout = sim.replay_layout(operations, StackFreeList(1, 13), 13, samples=6)
    assert layout.free_share == pytest.approx((6 + 2 + 2 + 4) / 4 / 13)
    assert layout.unusable_16 == layout.unusable_64 == 1.0
    # In one run lie all that are free, but for the last look.
    assert layout.external_fragmentation == pytest.approx(4 / 12 / 4)
    # Only at the end is there a prompt (two of the four) with room, but not in one run.
    assert layout.unusable_for_prompts == layout.prompts_without_run == 0.5 / 4
    assert layout.outside_longest_run == 0.5 / 4
    assert layout.mean_run == (6 / 2 + 10 / 3 + 10 / 3 + 8 / 2) / 4
    assert layout.runs_per_seq == 1.0


def test_timed_operations_give_each_request_its_blocks_and_take_them_back():
    shapes = [RequestShape(20, 30, 0.0), RequestShape(16, 1, 0.5), RequestShape(900, 5, 1.0)]
    operations = sim.timed_operations(shapes, units=50, block_size=16, token_s=0.1)
    # 20 tokens in 2 blocks, a third one for the 33rd, a fourth for the 49th, which is the last;
    # the third request has no room.
    assert operations == [(0, 2), (1, 1), (1, 0), (0, 1), (0, 1), (0, 0)]


def prompts_of(seed: int, count: int) -> list[RequestShape]:
    """Prompts that continue each other, as conversations do."""
    rng = np.random.default_rng(seed)
    fresh = itertools.count()
    known: list[tuple[int, ...]] = [()]
    shapes: list[RequestShape] = []
    for number in range(count):
        start = known[rng.integers(len(known))]
        start = start[: rng.integers(len(start) + 1)]
        pieces = (*start, *(next(fresh) for _ in range(rng.integers(1, 4))))
        length = len(pieces) * PIECE - int(rng.integers(0, PIECE))
        known.append(pieces[: length // PIECE])  # the id of a part of a piece is another one
        shapes.append(RequestShape(length, 5, float(number), pieces))
    return shapes


@pytest.mark.parametrize("block_size", [16, 128])
def test_with_room_for_everything_the_block_manager_finds_all_there_is(block_size: int):
    shapes = prompts_of(3, 60)
    tokens = sum(shape.prompt_len + 2 * block_size for shape in shapes)
    found, evicted = sim.found_by_the_block_manager(
        shapes, num_blocks=tokens // block_size, block_size=block_size, token_s=0.1
    )
    everything = sim.findable(shapes, block_size)
    assert evicted == 0 and found == everything > 0
    for bounded in (sim.found_by_lru, sim.found_by_belady):
        assert bounded(shapes, 10_000, block_size) == everything


def best_possible(shapes: list[RequestShape], pieces: int, held: frozenset[int] = frozenset()):
    """What the best of all choices of what to keep finds, by trying them all."""
    if not shapes:
        return 0
    first, rest = shapes[0], shapes[1:]
    hits = next((i for i, p in enumerate(first.pieces) if p not in held), len(first.pieces))
    candidates = sorted(held | set(first.pieces))
    choices = itertools.combinations(candidates, min(pieces, len(candidates)))
    tokens = min(hits * PIECE, first.prompt_len - 1) // 16 * 16
    return tokens + max(best_possible(rest, pieces, frozenset(choice)) for choice in choices)


@pytest.mark.parametrize("seed", range(8))
def test_belady_finds_as_much_as_the_best_of_all_choices(seed: int):
    shapes = prompts_of(seed, 6)
    found = sim.found_by_belady(shapes, 3, 16)
    assert found == best_possible(shapes, 3)
    assert sim.found_by_lru(shapes, 3, 16) <= found <= sim.findable(shapes, 16)
