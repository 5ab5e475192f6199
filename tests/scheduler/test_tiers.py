"""The books of the tiers below the pool: who is kept, who is forgotten, and in which order."""

import dataclasses

import numpy as np
import pytest

from scheduler import BeamChoice, SchedulerConfig
from scheduler.block_pool import BlockPool
from scheduler.prefix_index import ROOT
from scheduler.tiers import HostBlock, Tiers
from scheduler.transfers import SwapCost
from tests.support.drive import VOCAB, request, samples
from tests.support.tier_drive import TierDriver

SIZE = 16


class Books:
    """A pool of 20 blocks with tiers; content is named by small numbers."""

    def __init__(self, host, disk=0):
        self.pool = BlockPool(20, SIZE, durable=True)
        self.tiers = Tiers(self.pool.index, num_host_blocks=host, num_disk_blocks=disk)

    def tokens(self, name):
        return np.full(SIZE, name, np.int32).tobytes()

    def key(self, name):
        (key,) = self.pool.index.keys(self.tokens(name), None, b"")
        return key

    def fill(self, *names):
        """Put content into the pool; the blocks."""
        blocks = self.pool.take(len(names))
        for block, name in zip(blocks, names, strict=True):
            self.pool.index.add([block], ROOT, self.tokens(name))
        return blocks

    def drop(self, *names):
        """Content enters the pool and leaves it again; what has to be moved for that."""
        for block in self.fill(*names):
            self.pool.index.discard(block)
            self.pool.release([block])
        return self.tiers.take()

    def held(self):
        """Names of what host memory offers."""
        names = {self.key(name): name for name in range(100)}
        return sorted(names[key] for key in self.tiers.host_contents())

    def on_host(self, name):
        (held,) = self.tiers.find([self.key(name)])
        assert isinstance(held, HostBlock)
        return held


def test_what_the_pool_drops_is_stored_once():
    books = Books(host=4)
    transfers = books.drop(1, 2)
    assert len(transfers.stores) == 2 and books.held() == [1, 2]
    assert not books.drop(1, 2), "it is in host memory already"
    books.tiers.check([])


def test_the_least_recently_used_content_makes_room():
    """BM16 for host memory: a hit counts as a use, and so does leaving the pool again."""
    books = Books(host=3)
    for name in (1, 2, 3):
        books.drop(name)
    books.tiers.hold([books.on_host(1)])
    books.tiers.take()
    books.drop(2)
    books.drop(4)
    assert books.held() == [1, 2, 4]
    books.drop(5)
    assert books.held() == [2, 4, 5]
    books.tiers.check([])


def test_a_slot_is_not_filled_twice_before_one_step():
    """OF05, OF07: what is stored or loaded by a plan keeps its slot until that plan is made."""
    books = Books(host=2)
    blocks = books.fill(1, 2, 3, 4)
    for block in blocks:
        books.pool.index.discard(block)
    transfers = books.tiers.take()
    assert len(transfers.stores) == 2 == len(set(transfers.stores[:, 1].tolist()))
    assert books.held() == [1, 2] and books.tiers.counts.not_stored == 2
    books.tiers.hold([books.on_host(1), books.on_host(2)])
    books.tiers.load(books.on_host(1), blocks[0])
    books.tiers.load(books.on_host(2), blocks[1])
    books.fill(5)
    books.pool.index.discard(4)
    assert not len(books.drop(6).stores)


def test_saving_is_all_or_nothing():
    """BM17 for host memory: what is there already is not evicted to make room for the rest."""
    books = Books(host=4)
    books.drop(1, 2, 3)
    blocks = books.fill(1, 2, 8, 9, 10)
    keys = [books.key(name) for name in (1, 2)]
    assert books.tiers.save(blocks, keys) is None
    assert books.held() == [1, 2, 3] and not books.tiers.take()
    saved = books.tiers.save(blocks[:4], keys)
    assert saved is not None
    transfers = books.tiers.take()
    assert transfers.stores[:, 0].tolist() == blocks[2:4]
    assert books.held() == [1, 2], "3 made room"
    books.drop(4, 5)
    assert books.held() == [1, 2], "everything else is pinned"
    books.tiers.check(saved)
    books.tiers.release(saved)
    books.tiers.check([])
    assert books.tiers.num_host_available == 4 and books.held() == [1, 2]


def test_content_that_is_still_to_be_loaded_is_saved_where_it_lies():
    """Swapped in and out again for one plan: OF07 with the copies of one plan in their order."""
    books = Books(host=2)
    blocks = books.pool.take(1)
    (held,) = books.tiers.save(blocks, [])
    assert len(books.tiers.take().stores) == 1
    books.tiers.hold([held])
    books.tiers.load(held, blocks[0])
    books.tiers.release([held])
    again = books.tiers.save(blocks, [])
    assert again == [held], "the block holds something else when stores are carried out"
    transfers = books.tiers.take()
    assert not len(transfers.stores) and transfers.loads.tolist() == [[held.slot, blocks[0]]]
    books.tiers.check(again)
    books.tiers.release(again)
    assert books.tiers.num_host_available == 2


def test_a_block_that_is_handed_on_before_it_is_loaded_gets_what_its_new_owner_loads():
    books = Books(host=2)
    blocks = books.pool.take(3)
    one, two = books.tiers.save(blocks[:2], [])
    books.tiers.take()
    books.tiers.hold([one, two])
    books.tiers.load(one, blocks[2])
    books.tiers.load(two, blocks[2])
    assert books.tiers.take().loads.tolist() == [[two.slot, blocks[2]]]


def test_null_blocks_are_not_saved():
    books = Books(host=4)
    books.drop(1)
    blocks = books.fill(1, 2)
    saved = books.tiers.save([0, *blocks], [books.key(1)])
    assert saved is not None and saved[0] is None and None not in saved[1:]
    books.tiers.check(saved[1:])


def test_forgotten_content_is_not_found_but_saved_blocks_stay():
    """BM26: other weights."""
    books = Books(host=4, disk=4)
    books.drop(1, 2)
    blocks = books.fill(2, 3)
    saved = books.tiers.save(blocks, [books.key(2)])
    books.pool.forget()
    books.tiers.forget()
    assert books.held() == [] and books.tiers.take().forget_disk
    books.tiers.check(saved)
    slots = {held.slot for held in saved}
    assert len(slots) == 2
    for name in (5, 6):
        books.drop(name)
    assert not slots & set(books.tiers.host_contents().values())
    books.tiers.release(saved)
    assert books.tiers.num_host_available == 4


def test_swapping_costs_bytes_and_recomputing_tokens_with_their_attention():
    cost = SwapCost(
        block_bytes=1000,
        store_bytes_per_s=1e6,
        load_bytes_per_s=2e6,
        prefill_tokens_per_s=1e4,
        attention_tokens=120.0,
    )
    assert cost.swap_s(4) == pytest.approx(0.006)
    assert cost.recompute_s(60) == pytest.approx(0.006 * 1.5)
    assert cost.recompute_s(120) == pytest.approx(0.012 * 2)


both_ways = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def tier_driver(pipelined=True, **options):
    settings = dict(num_blocks=14, max_model_len=200, max_num_batched_tokens=64, num_host_blocks=60)
    return TierDriver(SchedulerConfig(**{**settings, **options}), pipelined)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def test_a_preempted_request_keeps_its_tokens_while_others_use_its_blocks():
    """OF07: its blocks are another's in the very next step."""
    driver = tier_driver(preemption="swap")
    driver.add(*[request(f"r{i}", prompt(i, 60), 60) for i in range(5)])
    driver.run()
    driver.verify()
    counts = driver.tiers.counts
    assert driver.scheduler.num_swaps == driver.scheduler.num_preemptions > 2
    assert counts.swapped_in == counts.swapped_out > 0
    computed = sum(plan.num_tokens for plan in driver.plans)
    assert computed == sum(60 + len(driver.outputs[s]) - 1 for s in driver.outputs), (
        "a token was computed twice"
    )


@both_ways
def test_a_request_that_is_swapped_in_and_out_again_by_one_plan_keeps_its_tokens(pipelined):
    """OF07: `low` makes way for `high`, which has to make way for the growth of `first` at once.

    `low` runs before `high`, though less urgent, since it is a beam that goes on from another one.
    """
    driver = tier_driver(num_blocks=7, preemption="swap", pipelined=pipelined)
    parent, low = samples("beam", 2, 15)
    parent, low = (
        dataclasses.replace(beam, beam=True, priority=priority)
        for beam, priority in ((parent, 0), (low, 5))
    )
    first = request("first", 40, 60)
    high = request("high", 20, 60, priority=1)
    driver.add(parent, low, first, high)
    scheduler = driver.scheduler
    while not scheduler.num_swaps:
        driver.step()  # until `first` needs the blocks of `high`
    by_name = {seq.request.request_id: seq for seq in scheduler.sequences()}
    growing = by_name["first"]
    while growing.num_tokens <= growing.capacity:  # else it needs a block now
        driver.step()
    assert by_name["high"].saved is not None and by_name[low.request_id].held
    scheduler.choose_beams(
        BeamChoice(name, parent.request_id, 7) for name in (parent.request_id, low.request_id)
    )
    driver.finish(parent.request_id)
    swapped_in = driver.tiers.counts.swapped_in
    driver.step()
    assert driver.tiers.counts.swapped_in == swapped_in + 2 and scheduler.num_swaps == 2
    driver.finish(low.request_id)
    driver.run()
    driver.verify()
    assert len(driver.outputs[by_name["high"].seq_id]) == 60


@both_ways
def test_a_request_that_is_swapped_out_before_its_block_is_copied_keeps_its_tokens(pipelined):
    """OF07: one plan admits the second sample in the place of `low`, and gives it up for `first`.

    The block with the end of the prompt, which both samples write to, is to be copied in between.
    """
    driver = tier_driver(num_blocks=7, preemption="swap", pipelined=pipelined)
    one, two = (dataclasses.replace(r, priority=1) for r in samples("sample", 2, 20, 60))
    driver.add(request("first", 40, 60), one, request("low", 5, 60, priority=5))
    driver.step()
    scheduler = driver.scheduler
    growing = scheduler.sequences()[0]
    while growing.num_tokens <= growing.capacity:  # else it needs a block now
        driver.step()
    driver.add(two)
    driver.step()
    assert scheduler.num_preemptions == 2 and scheduler.blocks.num_copied == 0
    assert not driver.plans[-1].copies.size, "by then somebody else may be given the block"
    saved = {seq.request.request_id: seq.num_computed for seq in scheduler.sequences() if seq.saved}
    assert saved.keys() == {two.request_id, "low"} and saved[two.request_id] == 19
    driver.run()
    driver.verify()


def test_swapping_falls_back_to_recomputing_when_host_memory_is_full():
    driver = tier_driver(preemption="swap", num_host_blocks=3)
    driver.add(*[request(f"r{i}", prompt(i, 60), 60) for i in range(5)])
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions > driver.scheduler.num_swaps


def test_a_request_waits_for_its_file_while_younger_ones_are_served():
    driver = tier_driver(num_host_blocks=4, num_disk_blocks=100)
    for seed in range(4):
        driver.add(request(f"warm{seed}", prompt(seed, 150), 2))
        driver.run()
    driver.disk.delays = 1.0  # from now on the disk stands still
    old, young = driver.add(request("old", prompt(0, 150), 2), request("young", prompt(9, 20), 30))
    for _ in range(9):
        driver.step()
    assert driver.outputs[old] == [] and len(driver.outputs[young]) > 5
    driver.disk.delays = 0.0
    driver.run()
    driver.verify()
    assert driver.tiers.counts.disk_hits > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_host_blocks=-1), "num_host_blocks must not be negative, got -1"),
        (dict(num_disk_blocks=5), "5 blocks on a disk need host memory"),
        (dict(preemption="drop"), "preemption must be one of .*'drop'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(num_blocks=10, max_model_len=100, **options)
