"""Admission: what a sequence begins with, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from scheduler.block_pool import NULL_BLOCK, BlockPool
from scheduler.config import SchedulerConfig
from scheduler.sequence import NO_ROW, Sequence
from scheduler.tiers import HostBlock, Tiers

Content = AbstractSequence[int | HostBlock]
"""For each of a sequence's first blocks a block of the pool to share, or what is to be loaded into
a new one; the null block stands for one that it needs no more."""


class Start(NamedTuple):
    """What a sequence begins with.

    Attributes:
        content: of its first blocks.
        num_computed: tokens whose keys and values these hold.
        source: the sibling whose blocks they are; None if they were found in the cache.
    """

    content: Content
    num_computed: int
    source: Sequence | None


class Admission:
    """Finds what sequences may begin with, says whether there is room, and counts what was found.

    It gives no block to anybody: that is `BlockManager.admit`.

    Args:
        config: sizes.
        pool: the blocks.
        tiers: host memory and disk below them; None without.

    Attributes:
        epoch: how often the prefix cache has been reset.
        num_lookup_tokens: prompt tokens of sequences admitted for the first time.
        num_hit_tokens: how many of them were cached.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, tiers: Tiers | None) -> None:
        self._config = config
        self._block_size = config.block_size
        self._pool = pool
        self._tiers = tiers
        self._expected: int | None = None  # the sequence whose blocks are being prefetched
        self.epoch = 0
        self.num_lookup_tokens = self.num_hit_tokens = 0

    def find_start(self, seq: Sequence, source: Sequence | None = None) -> Start:
        """The longest beginning of a sequence that is there.

        Args:
            seq: the sequence.
            source: a running sibling, whose blocks are shared if it has written more of the
                common prompt than the cache holds.
        """
        size = self._block_size
        found = self.find_prefix(seq)
        num_shared = 0 if source is None else self.num_shareable(seq, source)
        if source is not None and num_shared > len(found) * size:
            return Start(source.blocks[: -(-num_shared // size)], num_shared, source)
        return Start(found, len(found) * size, None)

    def find_prefix(self, seq: Sequence) -> Content:
        """Cached blocks with which a sequence may start."""
        if not self._config.prefix_caching:
            return []
        end = self._longest_prefix(seq)
        if self._tiers is not None:
            return self._tiers.find(seq.keys(self._pool.index, end // self._block_size))
        return self._pool.index.find(seq.known_bytes(0, end), seq.salt)

    def num_new_blocks(self, seq: Sequence, content: Content) -> int:
        """Blocks that a sequence needs for all its tokens besides those of its content."""
        return -(-seq.num_tokens // self._block_size) - sum(
            isinstance(part, int) for part in content
        )

    def has_room(
        self, seq: Sequence, content: Content, *, keep_free: int, given_up: Iterable[int] = ()
    ) -> bool:
        """Whether there are blocks for all tokens of a sequence.

        Args:
            seq: the sequence.
            content: what it begins with.
            keep_free: how many blocks must be free afterwards.
            given_up: blocks that it owns, and gives up before it takes any.
        """
        pool, own = self._pool, set(given_up)
        num_free = pool.num_free + sum(pool.num_owners(block) == 1 for block in own)
        num_free_hits = sum(  # who shares a block that nobody else owns takes a free one
            isinstance(part, int) and part != NULL_BLOCK and pool.num_owners(part) <= (part in own)
            for part in content
        )
        return self.num_new_blocks(seq, content) + num_free_hits + keep_free <= num_free

    def count(self, seq: Sequence, start: Start, *, is_first: bool) -> None:
        """Count what a sequence was admitted with.

        Args:
            seq: the sequence.
            start: what it was admitted with.
            is_first: whether it has computed nothing since its prompt was looked up, be it now or
                when it was admitted with less; of the latter, only the rest is counted.
        """
        size, of_prompt = self._block_size, range(0)
        if is_first:
            counted = seq.num_cached_tokens or 0
            self.num_hit_tokens += min(start.num_computed, seq.prompt_len) - counted
            if seq.num_cached_tokens is None:
                self.num_lookup_tokens += seq.prompt_len
            seq.num_cached_tokens = start.num_computed
            of_prompt = range(counted // size, seq.prompt_len // size)
        if self._tiers is not None:
            self._tiers.count_hits(start.content, of_prompt)

    def num_shareable(self, seq: Sequence, source: Sequence) -> int:
        """Tokens of `seq` whose keys and values it may take from a running sibling.

        They are written by an earlier plan, belong to the common prompt, were computed with the
        present weights, and leave what `find_prefix` leaves.
        """
        if not self.is_current(source) or source.row == NO_ROW:
            return 0
        shareable = min(source.num_written, self.num_shareable_at_most(seq))
        return shareable if source.num_passed <= self._config.num_passed_at(shareable) else 0

    def num_shareable_at_most(self, seq: Sequence) -> int:
        """The same, of a sibling that has written everything."""
        return _leaving_what_is_wanted(seq, seq.prompt_len)

    def is_current(self, seq: Sequence) -> bool:
        """Whether a running sequence was admitted after the last reset of the prefix cache."""
        return seq.epoch == self.epoch

    def expect(self, seq: Sequence) -> None:
        """A waiting sequence is the next one, but there is no room for it yet."""
        if self._tiers is not None and seq.seq_id != self._expected:
            self._expected = seq.seq_id
            below = self.find_prefix(seq) if seq.saved is None else seq.saved
            self._tiers.expect(held for held in below if isinstance(held, HostBlock))

    def look_on_disk(self, seq: Sequence) -> None:
        """Begin to read what only the disk has of the prefix of a waiting sequence, once."""
        if self._tiers is not None and self._config.prefix_caching and seq.coming is None:
            num_blocks = self._longest_prefix(seq) // self._block_size
            seq.coming = self._tiers.prefetch(seq.keys(self._pool.index, num_blocks))

    def _longest_prefix(self, seq: Sequence) -> int:
        """Tokens that a sequence may take from a cache."""
        return _leaving_what_is_wanted(seq, seq.num_known)


def _leaving_what_is_wanted(seq: Sequence, num_there: int) -> int:
    """Tokens that a sequence may take of so many that are there.

    At least its last token is left to compute, since that is where the next one is sampled, and so
    are the prompt tokens whose logits are still wanted.
    """
    end = min(num_there, seq.num_tokens - 1)
    return min(end, seq.score_from) if seq.score_from < seq.prompt_len else end
