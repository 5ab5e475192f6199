"""What is true between any two calls of the scheduler. Tests check it after every step."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.queue import urgency
from scheduler.scheduler import Scheduler
from scheduler.sequence import NO_ROW, Sequence, Status


def check(scheduler: Scheduler) -> None:
    """Compare the books of a scheduler with each other.

    Raises:
        AssertionError: they disagree.
    """
    seqs = scheduler.sequences()
    check_pool(scheduler.blocks.pool, seqs)
    _check_tables(scheduler, seqs)
    content = scheduler.blocks.pool.index.contents()
    for seq in seqs:
        _check_counters(seq)
        _check_content(seq, content, scheduler.config.block_size)
        _check_sharing(scheduler, seq)
    _check_tiers(scheduler, seqs)
    assert not scheduler.blocks.take_copies().size, "a copy is left for the next plan"
    running = [urgency(seq) for seq in seqs if seq.status is Status.RUNNING]
    waiting = [urgency(seq) for seq in seqs if seq.status is Status.WAITING]
    assert len(running) == scheduler.num_running and len(waiting) == scheduler.num_waiting
    assert len(set(seq.seq_id for seq in seqs)) == len(seqs), "a sequence is listed twice"
    for queue in (running, waiting):
        assert queue == sorted(queue), "a queue is out of order"
    # One that waits for a sibling or a file is passed over; one more urgent may just have come.
    alone = [urgency(seq) for seq in seqs if not seq.siblings and seq.status is not Status.DRAINING]
    if scheduler.blocks.tiers is None:
        by_priority = sorted(alone, key=lambda one: one[0])
        assert by_priority == sorted(alone), "of equals, first come is not first served"
    assert scheduler.has_unfinished() == bool(seqs)


def check_pool(pool: BlockPool, seqs: list[Sequence]) -> None:
    """Every block is free once or owned exactly by the sequences that list it.

    Raises:
        AssertionError: it is not.
    """
    free = pool.free_blocks()
    owners = Counter(block for seq in seqs for block in seq.blocks[seq.num_passed :])
    assert NULL_BLOCK not in owners and NULL_BLOCK not in free, "the null block is in use"
    assert len(free) == len(set(free)) == pool.num_free, "a block is free twice"
    assert pool.num_used + pool.num_free == pool.num_blocks - 1, "blocks leaked"
    assert not owners.keys() & set(free), "a block is free and owned"
    cached = [block in pool.index for block in free]
    assert cached == sorted(cached), "a cached block would be evicted before a blank one"
    assert NULL_BLOCK not in pool.index, "the null block is offered as a prefix"
    for block in range(1, pool.num_blocks):
        assert pool.num_owners(block) == owners[block], f"owners of block {block} miscounted"


def _check_tables(scheduler: Scheduler, seqs: list[Sequence]) -> None:
    config = scheduler.config
    rows = [seq.row for seq in seqs if seq.row != NO_ROW]
    assert len(rows) == len(set(rows)) == config.max_num_seqs - scheduler.blocks.num_free_rows
    for seq in seqs:
        assert (seq.row != NO_ROW) == (seq.status is Status.RUNNING)
        assert seq.capacity == len(seq.blocks) * config.block_size
        own = seq.blocks[seq.num_passed :]
        assert len(own) == len(set(own)), "a block is twice in one table"
        assert not any(seq.blocks[: seq.num_passed]), "a block that was passed is still listed"
        if seq.num_passed:
            last_seen = seq.num_computed - (config.window or seq.num_computed) + 1
            assert seq.num_passed * config.block_size <= last_seen, "a block was passed too early"
        if seq.row != NO_ROW:
            table = scheduler.blocks.table(seq)
            assert np.array_equal(table[seq.num_passed : len(seq.blocks)], own)
            if seq.num_passed:
                assert (table[: seq.num_passed] == own[0]).all(), "a block of others is named"
                full = (seq.num_passed + 1) * config.block_size
                assert full <= seq.num_computed, "a block is named that is not full"
            assert not table[len(seq.blocks) :].any(), "stale blocks behind the end of a table"


def _check_content(seq: Sequence, content: dict[int, bytes], size: int) -> None:
    """The blocks of a sequence hold its own tokens as far as the index knows them."""
    full = min(seq.num_computed, seq.num_known) // size
    for at, block in enumerate(seq.blocks):
        if block in content:
            assert at < full, "a block is offered before it is full"
            tokens = seq.tokens(at * size, (at + 1) * size)
            assert content[block] == tokens.tobytes(), "a block is offered as another one"


def _check_sharing(scheduler: Scheduler, seq: Sequence) -> None:
    """No sequence writes where another one reads, and siblings have their prompt in common."""
    blocks, size = scheduler.blocks, scheduler.config.block_size
    assert 0 <= seq.num_written <= seq.num_computed
    tail = seq.num_computed // size
    if not seq.tail_shared:
        for at in range(tail, len(seq.blocks)):
            assert blocks.is_own(seq, at), "a block that is written to has another reader"
    for at in range(tail + 1, len(seq.blocks)):
        assert blocks.is_own(seq, at), "a block is shared before anything is in it"
    for other in seq.siblings:
        assert other.prompt is seq.prompt and other.salt == seq.salt
        assert other.siblings is seq.siblings
        assert other.status is not Status.FINISHED
    assert not seq.siblings or seq in seq.siblings
    assert not seq.held or (seq.request.beam and seq.num_pending == 0)


def _check_tiers(scheduler: Scheduler, seqs: list[Sequence]) -> None:
    """What is saved below the pool belongs to waiting sequences and covers what they computed."""
    size = scheduler.config.block_size
    saved = [held for seq in seqs for held in seq.saved or ()]
    for seq in seqs:
        if seq.saved is not None:
            assert seq.status is Status.WAITING and len(seq.saved) == -(-seq.num_computed // size)
    tiers = scheduler.blocks.tiers
    if tiers is None:
        assert not saved
    else:
        tiers.check(held for held in saved if held is not None)


def _check_counters(seq: Sequence) -> None:
    assert seq.num_known == len(seq.prompt) + len(seq.outputs)
    assert 0 <= seq.num_pending <= 2
    assert seq.num_tokens <= seq.limit, "planned beyond the end"
    match seq.status:
        case Status.WAITING:
            assert not seq.blocks and (seq.num_computed == 0 or seq.saved is not None)
        case Status.RUNNING:
            assert seq.num_computed <= min(seq.capacity, seq.num_tokens)
            assert seq.num_computed < seq.limit - (not seq.request.beam)
        case Status.DRAINING:
            assert seq.num_pending and seq.num_tokens == seq.limit and not seq.blocks
        case Status.FINISHED:
            raise AssertionError("a finished sequence is still known")
