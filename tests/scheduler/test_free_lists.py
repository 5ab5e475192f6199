"""The free lists beside a set, and what the buddy system promises about runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import SchedulerConfig
from scheduler.free_lists import BuddyFreeList, FreeList, StackFreeList
from tests.support.drive import Driver, request, samples


def check_runs(free: BuddyFreeList) -> None:
    """Runs are aligned, do not overlap, and no run lies beside its free buddy."""
    runs = free.runs()
    starts = dict(runs)
    end = 0
    for start, order in runs:
        assert start % (1 << order) == 0 and start >= end
        end = start + (1 << order)
        assert starts.get(start ^ (1 << order)) != order, "two buddies are not merged"
    assert len(free) == sum(1 << order for _, order in runs)


@pytest.mark.parametrize("kind", [StackFreeList, BuddyFreeList])
@settings(max_examples=150, deadline=None)
@given(
    end=st.integers(2, 200),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 199), st.integers(1, 40)), max_size=60),
)
def test_every_block_is_handed_out_once_and_comes_back(
    kind: type[StackFreeList] | type[BuddyFreeList],
    end: int,
    steps: list[tuple[bool, int, int]],
):
    free: FreeList = kind(1, end)
    inside, outside = set(range(1, end)), list[int]()
    for takes, at, count in steps:
        if takes:
            count = min(count, len(inside))
            after = outside[at % len(outside)] if outside and at % 3 else None
            blocks = free.take(count, after)
            assert len(blocks) == count == len(set(blocks)) and inside.issuperset(blocks)
            if kind is BuddyFreeList and after is not None and count:
                assert (blocks[0] == after + 1) == (after + 1 in inside)
            inside.difference_update(blocks)
            outside += blocks
        else:
            back = outside[at % (len(outside) + 1) :][:count]
            outside = [block for block in outside if block not in set(back)]
            free.give(back)
            inside.update(back)
        assert len(free) == len(inside) and set(free.blocks()) == inside
        if isinstance(free, BuddyFreeList):
            check_runs(free)
    free.give(outside)
    if isinstance(free, BuddyFreeList):
        fresh = BuddyFreeList(1, end)
        assert free.runs() == fresh.runs(), "what was split has not been merged again"


def test_a_sequence_gets_one_run_where_there_is_one():
    free = BuddyFreeList(1, 128)
    for count in (1, 2, 3, 5, 8, 13, 21, 30):
        blocks = free.take(count)
        assert blocks == list(range(blocks[0], blocks[0] + count))


def test_sequences_grow_in_runs_of_their_own():
    """Two that grow in turns do not get into each other's way."""
    free = BuddyFreeList(1, 256)
    tables = [free.take(4), free.take(4)]
    for _ in range(40):
        for table in tables:
            table += free.take(1, table[-1])
    for table in tables:
        breaks = sum(b != a + 1 for a, b in zip(table, table[1:], strict=False))
        assert breaks <= 4


@pytest.mark.parametrize("caching", [True, False])
def test_the_scheduler_serves_with_either(caching: bool):
    config = {"num_blocks": 40, "max_model_len": 300, "prefix_caching": caching}
    outputs = []
    for contiguous in (True, False):
        driver = Driver(SchedulerConfig(**config, contiguous_blocks=contiguous))
        driver.add(*samples("a", 3, 70, 60), *[request(f"r{i}", 20 * i, 50) for i in range(1, 8)])
        driver.run()
        driver.verify()
        outputs.append(driver.outputs)
        assert driver.scheduler.num_free_blocks == 39
    assert outputs[0] == outputs[1]
