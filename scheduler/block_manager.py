"""Block tables: which blocks of the pool hold the tokens of which sequence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler.admission import Admission, Content, Start
from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import Int32
from scheduler.prefix_index import ROOT
from scheduler.sequence import NO_ROW, Sequence
from scheduler.tiers import HostBlock, Tiers


class BlockManager:
    """Gives blocks to sequences and keeps their block tables as rows of one array.

    A row's entries behind the blocks of its sequence are the null block.

    With prefix caching, a full block is indexed once its tokens are known to the host and the
    plan that computes it has been handed out; what another sequence then reads there was written
    by an earlier step. A sequence is admitted with the blocks of its longest indexed prefix, or
    with those that a sibling has written, if these are more.

    Copy-on-write: sequences share blocks by reference, the last one too, which may be partly
    filled. A sequence writes to a block only while it is the only owner and the index does not
    offer it; otherwise it gets a copy first, which the next plan carries out (`take_copies`). So
    of several owners all but the last to write copy.

    Where every layer has an attention window, blocks that no later token sees are given up. Their
    places in the table name the first block that is left: kernels may read it there and have to
    mask it, as they mask the rest of a tile, and what they read is the sequence's own and finite.

    With host memory below the pool, the longest prefix is looked for there too, and blocks that
    were found there are loaded before the plan's step.

    Args:
        config: sizes of the pool and of the tables.

    Attributes:
        pool: the blocks.
        tiers: host memory and disk below them; None without.
        admission: what sequences begin with.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        has_tiers = config.num_host_blocks > 0
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            contiguous=config.contiguous_blocks,
            durable=has_tiers,
        )
        self.tiers: Tiers | None = None
        if has_tiers:
            self.tiers = Tiers(
                self.pool.index,
                num_host_blocks=config.num_host_blocks,
                num_disk_blocks=config.num_disk_blocks,
            )
        self.admission = Admission(config, self.pool, self.tiers)
        self._config = config
        self._block_size = config.block_size
        # Each time all places of what was given up change, on the device too: not for every block.
        self._pass_at_once = max((config.window or 0) // config.block_size // 8, 1)
        self._tables = np.zeros((config.max_num_seqs, config.max_blocks_per_seq), np.int32)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._copies: dict[int, int] = {}  # sources by destination
        self._copied_from: list[int] = []
        self.num_copied = 0
        """Blocks copied so far because a sequence wrote to one that it shared."""

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be given blocks at the same time."""
        return len(self._free_rows)

    def admit(self, seq: Sequence, *, keep_free: int, source: Sequence | None = None) -> bool:
        """Give a waiting sequence a row and the blocks of all the tokens it has.

        The blocks of its longest cached prefix are shared, and its `num_computed` starts there.

        Args:
            seq: the sequence; it owns no blocks and a row is free.
            keep_free: how many blocks must be free afterwards.
            source: a running sibling, whose blocks are shared if it has written more of the
                common prompt than the cache holds.

        Returns:
            Whether it was admitted; nothing has changed if not.
        """
        if keep_free >= self.pool.num_free:  # it needs a block at least, so spare the search
            return False
        start = self.admission.find_start(seq, source)
        if not self._begin(seq, start, keep_free=keep_free):
            return False
        self.admission.count(seq, start, is_first=seq.num_cached_tokens is None)
        return True

    def admit_anew(self, seq: Sequence) -> None:
        """Admit a running sequence anew if the cache has more of it than it has computed.

        It keeps its place if there is no room for that, as when others go on using blocks of its
        own that the cache has forgotten meanwhile, and has what it finds in host memory.
        """
        start, own = self.admission.find_start(seq), seq.blocks[seq.num_passed :]
        if start.num_computed <= seq.num_computed:
            return
        if not self.admission.has_room(seq, start.content, keep_free=0, given_up=own):
            return
        is_first = seq.num_cached_tokens == seq.num_computed and not seq.outputs
        self.free(seq)
        has_begun = self._begin(seq, start, keep_free=0)
        assert has_begun, "it needs no more blocks than are free now"
        self.admission.count(seq, start, is_first=is_first)

    def _begin(self, seq: Sequence, start: Start, *, keep_free: int) -> bool:
        """Give a sequence without blocks a row and those of all its tokens.

        Returns:
            Whether there was room; nothing has changed if not.
        """
        num_full, tail = divmod(start.num_computed, self._block_size)
        # The last block is shared, and written to at once, if there is a tail.
        if not self._place(seq, start.content, keep_free=keep_free + (tail > 0)):
            return False
        seq.num_computed = start.num_computed
        seq.epoch = self.admission.epoch
        if start.source is not None:
            self._continue_chain(seq, start.source)
        else:
            seq.num_indexed = num_full
            if self._config.prefix_caching:
                last = seq.blocks[num_full - 1] if num_full else None
                seq.parent = ROOT if last is None else self.pool.index.number(last)
        if tail:
            self._own(seq, num_full)
        return True

    def share(self, source: Sequence) -> list[int]:
        """Become one more owner of all the blocks of a sequence, to `fork` it."""
        self.pool.share(source.blocks[source.num_passed :])
        return list(source.blocks)

    def fork(self, seq: Sequence, source: Sequence, blocks: list[int]) -> bool:
        """Let a sequence go on where another one stands, instead of with blocks of its own.

        Args:
            seq: the sequence; it keeps its row if it has one.
            source: another sequence, or a copy of what it was, with all its tokens computed.
            blocks: what `share` returned for it.

        Returns:
            Whether `seq` has the blocks now; if no row was left, nobody has.
        """
        if seq.row == NO_ROW and not self._free_rows:
            self.pool.release(reversed(blocks[source.num_passed :]))
            return False
        if seq.row == NO_ROW:
            seq.row = self._free_rows.pop()
        else:
            self._clear(seq)
        self._append(seq, blocks)
        seq.num_passed = source.num_passed
        self._hide_passed(seq)
        seq.num_computed = seq.num_written = source.num_computed
        seq.epoch = source.epoch
        seq.tail_shared = source.tail_shared = True
        self._continue_chain(seq, source)
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens of a sequence in all.

        Returns:
            Whether there is room now; nothing has changed if not.
        """
        needed = max(-(-num_tokens // self._block_size) - len(seq.blocks), 0)
        tail = seq.num_computed // self._block_size
        copies = seq.tail_shared and tail < len(seq.blocks) and not self.is_own(seq, tail)
        if needed + copies > self.pool.num_free:
            return False
        if copies:
            self._own(seq, tail)
        seq.tail_shared = False
        if needed:
            self._append(seq, self.pool.take(needed, seq.blocks[-1]))
        return True

    def is_own(self, seq: Sequence, at: int) -> bool:
        """Whether nobody else reads or will find the block `at` of a sequence."""
        block = seq.blocks[at]
        return self.pool.num_owners(block) == 1 and block not in self.pool.index

    def free(self, seq: Sequence) -> None:
        """Take all blocks and the row of a sequence; does nothing if it has none.

        The end of a prefix is of use only with its beginning, so it is to be evicted first.
        """
        if seq.saved is not None and self.tiers is not None:
            self.tiers.release(seq.saved)
            seq.saved = None
            seq.num_computed = 0
        if seq.row == NO_ROW:
            return
        self.index_full_blocks(seq)
        self._clear(seq)
        self._free_rows.append(seq.row)
        seq.row = NO_ROW
        seq.num_computed = seq.num_written = 0
        seq.parent = None

    def index_full_blocks(self, seq: Sequence) -> None:
        """Let others find the blocks of a sequence that are full of computed, known tokens."""
        size = self._block_size
        next_end = (seq.num_indexed + 1) * size
        if seq.num_known < next_end or seq.num_computed < next_end or seq.parent is None:
            return
        full = min(seq.num_computed, seq.num_known) // size
        tokens = seq.known_bytes(seq.num_indexed * size, full * size)
        blocks = seq.blocks[seq.num_indexed : full]
        seq.parent = self.pool.index.add(blocks, seq.parent, tokens, seq.salt)
        seq.num_indexed = full

    def give_up_passed(self, seq: Sequence) -> None:
        """Give up the blocks that no token of a sequence sees which is still to be computed."""
        passed = self._config.num_passed_at(seq.num_computed)
        if seq.parent is not None:  # what is to be found by others has to be indexed first
            passed = min(passed, seq.num_indexed)
        if passed < seq.num_passed + self._pass_at_once or seq.row == NO_ROW:
            return
        gone = slice(seq.num_passed, passed)
        self.pool.release(reversed(seq.blocks[gone]))
        seq.blocks[gone] = [NULL_BLOCK] * (passed - seq.num_passed)
        seq.num_passed = passed
        self._hide_passed(seq)

    def swap_out(self, seq: Sequence) -> bool:
        """Keep what a sequence has computed in host memory, and take all its blocks and its row.

        Returns:
            Whether it had computed any and host memory had room; nothing has changed if not.
        """
        if self.tiers is None or not seq.num_computed:
            return False
        self.index_full_blocks(seq)
        blocks = seq.blocks[: -(-seq.num_computed // self._block_size)]
        # What is still to be copied into a block, after all is saved, lies in another one.
        blocks = [self._copies.get(block, block) for block in blocks]
        keys = seq.keys(self.pool.index, seq.num_indexed) if seq.parent is not None else []
        saved = self.tiers.save(blocks, keys)
        if saved is None:
            return False
        num_computed, parent = seq.num_computed, seq.parent
        self.free(seq)
        seq.saved, seq.num_computed, seq.parent = saved, num_computed, parent
        return True

    def swap_in(self, seq: Sequence, *, keep_free: int) -> bool:
        """Give a sequence that was swapped out a row and blocks with what it had computed.

        Args:
            seq: the sequence; a row is free.
            keep_free: how many blocks must be free afterwards.

        Returns:
            Whether it runs again; nothing has changed if not.
        """
        saved, tiers, index = seq.saved, self.tiers, self.pool.index
        assert saved is not None and tiers is not None
        content: list[int | HostBlock] = []
        for held in saved:
            on_gpu = index.get(held.key) if held is not None and held.key is not None else None
            content.append(on_gpu or held or NULL_BLOCK)
        if not self._place(seq, content, keep_free=keep_free):
            return False
        tiers.counts.swapped_in += sum(held is not None for held in saved)
        tiers.release(saved)
        seq.saved = None
        return True

    def reset_prefix_cache(self, seqs: Iterable[Sequence]) -> None:
        """Forget all content, and never index what the sequences of now go on computing."""
        self.pool.forget()
        if self.tiers is not None:
            self.tiers.forget()
        self.admission.epoch += 1
        for seq in seqs:
            seq.parent = None

    def take_copies(self) -> Int32:
        """The block copies that the plan being made has to start with.

        Returns:
            int32[num_copies, 2], source and destination; they are not returned again.
        """
        copies = np.array([*self._copies.items()], np.int32).reshape(-1, 2)[:, ::-1].copy()
        self.num_copied += len(copies)
        self._copies.clear()
        self.pool.release(self._copied_from)
        self._copied_from.clear()
        return copies

    def tables(self, rows: list[int], num_tokens: int) -> Int32:
        """Copy the tables of some rows, none of which holds more than `num_tokens` tokens.

        Returns:
            int32[len(rows), max_blocks_per_seq].
        """
        # Zeroed memory comes untouched from the system: only the columns in use cost time.
        copy = np.zeros((len(rows), self._tables.shape[1]), np.int32)
        width = -(-num_tokens // self._block_size)
        copy[:, :width] = self._tables[rows, :width]
        return copy

    def table(self, seq: Sequence) -> Int32:
        """The whole row of a sequence that has one, int32[max_blocks_per_seq]; do not write."""
        return self._tables[seq.row]

    def _place(self, seq: Sequence, content: Content, *, keep_free: int) -> bool:
        """Give a sequence a row and the blocks of all its tokens.

        Args:
            seq: the sequence; it owns no blocks and a row is free.
            content: of the first ones.
            keep_free: how many blocks must be free afterwards.

        Returns:
            Whether it has them; nothing has changed if not.
        """
        if not self.admission.has_room(seq, content, keep_free=keep_free):
            return False
        pool = self.pool
        shared = [part for part in content if isinstance(part, int) and part != NULL_BLOCK]
        below = [part for part in content if isinstance(part, HostBlock)]
        pool.share(shared)  # before any block is taken, which might evict them
        if self.tiers is not None:
            self.tiers.hold(below)  # likewise
        seq.row = self._free_rows.pop()
        num_new = self.admission.num_new_blocks(seq, content)
        new = iter(pool.take(num_new, shared[-1] if shared else None))
        blocks: list[int] = []
        for part in content:
            if isinstance(part, HostBlock) and self.tiers is not None:
                blocks.append(next(new))
                self.tiers.load(part, blocks[-1])
            elif isinstance(part, int):
                blocks.append(part)
        self._append(seq, [*blocks, *new])
        while seq.num_passed < len(blocks) and blocks[seq.num_passed] == NULL_BLOCK:
            seq.num_passed += 1
        self._hide_passed(seq)
        return True

    def _hide_passed(self, seq: Sequence) -> None:
        """Name the first block that a sequence still has in the places of those given up."""
        if seq.num_passed:
            self._tables[seq.row, : seq.num_passed] = seq.blocks[seq.num_passed]

    def _continue_chain(self, seq: Sequence, source: Sequence) -> None:
        """Let `seq` index its blocks from where `source`, with which it shares them, stands."""
        if source.num_indexed * self._block_size <= seq.num_computed or source.parent is None:
            seq.num_indexed, seq.parent = source.num_indexed, source.parent
        elif seq.num_passed:  # likewise, but the way leads over blocks that are given up
            seq.num_indexed, seq.parent = 0, None
        else:  # its blocks are indexed beyond the common ones: find the way again
            seq.num_indexed, seq.parent = 0, ROOT

    def _own(self, seq: Sequence, at: int) -> None:
        """Replace a block that others read by a copy, unless it has no other reader left."""
        if self.is_own(seq, at):
            return
        old = seq.blocks[at]
        (new,) = self.pool.take(1, seq.blocks[at - 1] if at else None)
        self._copies[new] = self._copies.get(old, old)  # the old one may be such a copy itself
        if self.pool.num_owners(old) > 1:
            self.pool.release([old])
        else:  # the plan must not load anything into it before it is copied
            self._copied_from.append(old)
        seq.blocks[at] = self._tables[seq.row, at] = new

    def _clear(self, seq: Sequence) -> None:
        """Give up all blocks of a sequence, the last one to be evicted first, and their copies."""
        self._copies = {new: old for new, old in self._copies.items() if new not in seq.blocks}
        self.pool.release(reversed(seq.blocks[seq.num_passed :]))
        self._tables[seq.row, : len(seq.blocks)] = 0
        seq.blocks = []
        seq.num_passed = 0
        seq.capacity = 0
        seq.tail_shared = False

    def _append(self, seq: Sequence, blocks: list[int]) -> None:
        end = len(seq.blocks) + len(blocks)
        self._tables[seq.row, len(seq.blocks) : end] = blocks
        seq.blocks += blocks
        seq.capacity = end * self._block_size
