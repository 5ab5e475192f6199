"""What a scheduler knows, as plain data, and back: for a restart, or for a pool of another size.

A snapshot speaks of the pool's blocks by their numbers; whoever takes it keeps their content beside
it. Where it is restored the content gets other blocks, and the caller is told which.

Plans in flight are left out: what they compute is computed again afterwards. So are beam searches,
whose beams are known to the engine; where they are restored they begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.block_manager import BlockManager
from scheduler.block_pool import NULL_BLOCK
from scheduler.prefix_index import ROOT
from scheduler.queue import urgency
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """A sequence whose tokens are known up to here.

    Attributes:
        request_id: of its request.
        outputs: generated tokens.
        score_from: first prompt position whose logits are still wanted.
        num_cached_tokens: as `Sequence.num_cached_tokens`.
        is_running: whether it had been admitted.
        num_computed: tokens whose keys and values are in `blocks`; less than the tokens it has.
        blocks: in order; empty if nothing that it has computed is kept.
        num_passed: how many of them have left the attention window.
    """

    request_id: str
    outputs: tuple[int, ...]
    score_from: int
    num_cached_tokens: int | None
    is_running: bool
    num_computed: int = 0
    blocks: tuple[int, ...] = ()
    num_passed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """A full block that can be found by its tokens.

    Attributes:
        block: its number.
        parent: the block before it, the null block for the first of a sequence.
        tokens: its int32 token ids, as bytes.
        salt: what the content depends on besides the tokens.
    """

    block: int
    parent: int
    tokens: bytes
    salt: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """A scheduler's sequences and cache.

    Attributes:
        sequences: the oldest first.
        cached: blocks of the prefix cache, the least recently used first.
    """

    sequences: list[SequenceState]
    cached: list[CachedBlock]

    def blocks(self) -> list[int]:
        """All blocks whose content belongs to the state, in rising order."""
        owned = {block for seq in self.sequences for block in seq.blocks}
        return sorted((owned | {one.block for one in self.cached}) - {NULL_BLOCK})


def export_state(scheduler: Scheduler, untold: Mapping[str, int] | None = None) -> SchedulerState:
    """The state of a scheduler, which stays as it is.

    Args:
        scheduler: between two calls.
        untold: for requests whose prompt's logits are wanted, the first position that has been
            planned and whose logits are still in flight.
    """
    untold = untold or {}
    live = sorted(scheduler.sequences(), key=lambda seq: seq.seq_id)
    sequences = [
        _sequence_state(seq, untold.get(seq.request.request_id), scheduler)
        for seq in live
        if not seq.request.beam
    ]
    return SchedulerState(sequences=sequences, cached=_cached_blocks(scheduler.blocks))


def restore_state(scheduler: Scheduler, state: SchedulerState) -> dict[int, int]:
    """Put sequences and cache into a scheduler in which nothing runs.

    What does not fit into its pool is left out: of the cache the least recently used blocks, of
    the sequences the least urgent, which then compute their tokens again. What the pool had cached
    is forgotten; what lies below it can still be found, since the weights are the same.

    Args:
        scheduler: the requests of all sequences of `state` have been added to it.
        state: of a scheduler with the same block size.

    Returns:
        For content that is to be copied, block in the snapshot by block in the pool.
    """
    size, sequences = scheduler.config.block_size, state.sequences
    scheduler.blocks.pool.forget()
    waiting = {seq.request.request_id: seq for seq in scheduler.sequences()}
    cached = {one.block for one in state.cached}
    reserved = 0  # blocks that sequences will take besides those in the cache
    for one in sequences:
        seq = waiting[one.request_id]
        seq.outputs.extend(one.outputs)
        seq.num_known = seq.num_tokens = len(seq.prompt) + len(one.outputs)
        seq.score_from = one.score_from
        if one.is_running:
            reserved += -(-seq.num_known // size) - sum(block in cached for block in one.blocks)
    index = scheduler.blocks.pool.index
    # The content of what is indexed here comes later: none of it is to be kept in a lower tier.
    on_discard, index.on_discard = index.on_discard, None
    sources = _restore_cache(scheduler, state, reserved)
    has_room = True  # in the order of service: after one that has to wait, all do
    for one in sorted(sequences, key=lambda one: urgency(waiting[one.request_id])):
        seq = waiting[one.request_id]
        if one.is_running and has_room:
            has_room = scheduler.resume(seq)
            if has_room:
                sources |= _restore_blocks(seq, one, scheduler.blocks)
        seq.num_cached_tokens = one.num_cached_tokens
    index.on_discard = on_discard
    return sources


def _sequence_state(seq: Sequence, untold: int | None, scheduler: Scheduler) -> SequenceState:
    score_from = seq.score_from if untold is None else min(seq.score_from, untold)
    # What was computed with other weights is not to be mixed with what is in the cache.
    keeps = seq.status is Status.RUNNING and scheduler.blocks.admission.is_current(seq)
    num_computed = min(seq.num_computed, seq.num_known - 1) if keeps else 0
    if score_from < len(seq.prompt):
        num_computed = min(num_computed, score_from)
    window, size = scheduler.config.window, scheduler.config.block_size
    if window is not None and seq.num_passed > max(num_computed - window + 1, 0) // size:
        num_computed = 0  # the plans in flight need a block less than what they are undone to
    num_blocks = -(-num_computed // size)
    return SequenceState(
        request_id=seq.request.request_id,
        outputs=tuple(seq.outputs),
        score_from=score_from,
        num_cached_tokens=seq.num_cached_tokens,
        is_running=seq.status is not Status.WAITING,
        num_computed=num_computed,
        blocks=tuple(seq.blocks[:num_blocks]),
        num_passed=min(seq.num_passed, num_blocks),
    )


def _cached_blocks(blocks: BlockManager) -> list[CachedBlock]:
    """The indexed blocks that can be reached from the start of a sequence."""
    index = blocks.pool.index
    entries = {entry.block: entry for entry in index.entries()}
    block_of = {index.number(block): block for block in entries} | {ROOT: NULL_BLOCK}
    free = [block for block in blocks.pool.free_blocks() if block in entries]
    in_use = [block for block in entries if blocks.pool.num_owners(block)]
    return [
        CachedBlock(
            block=block,
            parent=block_of[entries[block].parent],
            tokens=entries[block].tokens,
            salt=entries[block].salt,
        )
        for block in (*free, *in_use)
        if entries[block].parent in block_of
    ]


def _restore_cache(scheduler: Scheduler, state: SchedulerState, reserved: int) -> dict[int, int]:
    """Index as much of the cache as there is room for beside `reserved` blocks.

    Returns:
        Block in the snapshot by block in the pool.
    """
    pool = scheduler.blocks.pool
    room = max(pool.num_free - reserved, 0) if scheduler.config.prefix_caching else 0
    kept = {one.block: one for one in state.cached[len(state.cached) - room :]} if room else {}
    new = dict(zip(kept, pool.take(len(kept)), strict=True))
    numbers = {NULL_BLOCK: ROOT}
    for one in kept.values():
        chain = [one]
        while chain[-1].parent not in numbers and chain[-1].parent in kept:
            chain.append(kept[chain[-1].parent])
        for link in reversed(chain):
            if link.block not in numbers and link.parent in numbers:
                number = numbers[link.parent]
                added = pool.index.add([new[link.block]], number, link.tokens, link.salt)
                numbers[link.block] = added
    pool.release(new.values())  # least recently used first; those that are not indexed are blank
    return {block: old for old, block in new.items() if old in numbers}


def _restore_blocks(seq: Sequence, one: SequenceState, blocks: BlockManager) -> dict[int, int]:
    """Let a sequence that has been given blocks stand where it stood.

    Returns:
        Block in the snapshot by block in the pool, for what was not found in the cache.
    """
    first = seq.num_indexed  # what was found
    seq.num_computed = seq.num_written = max(one.num_computed, seq.num_computed)
    if one.num_passed > first:
        seq.parent = None  # its first blocks are empty: nobody is to find them
        blocks.give_up_passed(seq)
    pairs = zip(one.blocks[first:], seq.blocks[first : len(one.blocks)], strict=True)
    return {new: old for old, new in pairs if NULL_BLOCK not in (old, new)}
