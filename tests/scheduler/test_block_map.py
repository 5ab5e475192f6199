"""The picture of the pool, and the fragmentation read from it."""

import numpy as np
import pytest

from scheduler import Scheduler, SchedulerConfig
from scheduler.block_map import BlockMap, block_map
from tests.support.drive import request


def map_of(used, tokens=None, cached=None):
    """A map from a string of one character per block: `#` used, `c` cached, `.` blank."""
    flags = np.array(list(used))
    tokens = np.where(flags == "#", 16, 0) if tokens is None else np.array(tokens)
    return BlockMap(
        block_size=16, used=flags == "#", cached=flags == "c", tokens=tokens.astype(np.int32)
    )


@pytest.mark.parametrize(
    ("picture", "wanted"),
    [
        ("." * 40, 0.0),
        ("#" * 40, 0.0),
        ("####....", 0.0),  # few blocks are free, and all of them in one run
        (".######.", 2 / 8),
        ("#.#.#.#.", 4 / 8),
        ("..#c.c#.", 6 / 8),
        ("." * 16 + "#" + "." * 15, 15 / 32),
        ("." * 16 + "#" + "." * 16, 0.0),
        ("c" * 8 + "." * 8 + "#." * 3, 3 / 22),  # cached blocks are free
    ],
)
def test_external_fragmentation_is_what_is_free_in_short_runs(picture, wanted):
    assert map_of(picture).external_fragmentation == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(20))
def test_external_fragmentation_counts_runs_as_reading_the_picture_does(seed):
    rng = np.random.default_rng(seed)
    picture = "".join(
        str(rng.choice(list("#c."))) * int(rng.integers(1, 12)) for _ in range(rng.integers(1, 30))
    )
    runs = [len(run) for run in picture.replace("c", ".").split("#")]
    lost = sum(length for length in runs if length < min(16, sum(runs)))
    assert map_of(picture).external_fragmentation == pytest.approx(lost / len(picture))


def test_internal_fragmentation_counts_the_empty_ends_of_used_blocks():
    assert map_of("##.#", [16, 3, 0, 16]).internal_fragmentation == pytest.approx(13 / 48)
    assert map_of("....").internal_fragmentation == 0.0


@pytest.mark.parametrize("count", [1, 3, 7, 100])
def test_regions_count_every_block_once(count):
    rng = np.random.default_rng(count)
    picture = map_of("".join(rng.choice(list("#c."), 61)))
    size, used, cached = picture.regions(count)
    assert len(size) == min(count, 61)
    assert size.sum() == 61 and size.max() - size.min() <= 1
    ends = np.cumsum(size)
    for index, end in enumerate(ends):
        part = slice(end - size[index], end)
        assert used[index] == picture.used[part].sum()
        assert cached[index] == picture.cached[part].sum()


def step(scheduler):
    plan = scheduler.schedule()
    scheduler.update(plan, np.full(plan.num_samples, 7, np.int32))


def test_the_map_follows_a_sequence_from_its_first_block_to_the_cache():
    scheduler = Scheduler(SchedulerConfig(num_blocks=9, max_model_len=100))
    scheduler.add(request("a", 40, max_tokens=3))
    empty = block_map(scheduler)
    assert not empty.used.any() and not empty.cached.any() and len(empty.used) == 8
    step(scheduler)
    full = block_map(scheduler)
    assert sorted(full.tokens[full.used].tolist()) == [8, 16, 16]
    assert full.internal_fragmentation == pytest.approx(8 / 48)
    step(scheduler)
    assert sorted(block_map(scheduler).tokens.tolist())[-3:] == [9, 16, 16]
    step(scheduler)
    after = block_map(scheduler)
    assert not after.used.any()
    assert after.cached.sum() == 2  # the full blocks; the last one is blank again
    assert scheduler.blocks.pool.num_cached == 2


def test_a_shared_block_counts_once():
    scheduler = Scheduler(SchedulerConfig(num_blocks=20, max_model_len=100))
    prompt = list(range(32))
    scheduler.add(request("first", prompt, max_tokens=9))
    step(scheduler)
    scheduler.add(request("second", [*prompt, 5], max_tokens=9))
    step(scheduler)
    assert scheduler.num_running == 2
    picture = block_map(scheduler)
    assert picture.used.sum() == 4  # two shared, and one of its own for each
    assert picture.tokens.sum() == 32 + 1 + 1
    blocks = scheduler.blocks
    assert (blocks.admission.num_lookup_tokens, blocks.admission.num_hit_tokens) == (65, 32)


def test_evictions_are_counted():
    scheduler = Scheduler(SchedulerConfig(num_blocks=5, max_model_len=60))
    for name in "abc":
        scheduler.add(request(name, 33, max_tokens=1))
        step(scheduler)
    # Four blocks, three per prompt, of which two are full. The second prompt evicts one of the
    # first's; the third evicts the other, and one of the second's.
    assert scheduler.blocks.pool.num_evicted == 1 + 2
    assert scheduler.blocks.pool.num_cached == 2 + 1
