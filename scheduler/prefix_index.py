"""Which block holds the keys and values of which tokens.

The keys and values of a block depend on its own tokens and on all tokens before them. Content is
therefore named by a chain: each full block that is indexed gets a fresh number, and the next
block of the chain is indexed under (number of the content before it, own tokens). Both are
compared in full when a block is looked up, so two prefixes share a block only if all their tokens
are equal; a hash collision costs time and nothing else. Numbers are never used again, so nothing
can be found behind a block that has been evicted.

Where content outlives its block, in host memory or in a file, its number must be the same whenever
and by whomever it is computed. It is then a 256-bit digest of what it is indexed under, and two
prefixes could share a block only by a collision of BLAKE2b.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

ROOT = 0
"""Number of the empty content before the first block."""

_COUNTER_BYTES = 8
_DIGEST_BYTES = 32


def block_key(parent: int, tokens: bytes, salt: bytes, parent_bytes: int = _COUNTER_BYTES) -> bytes:
    """What a full block is indexed under: the content before it, and its own tokens.

    One flat `bytes` remembers its hash and is nothing for the garbage collector to visit. Number
    and tokens have a fixed width, so the salt behind them makes no two keys look the same. It is
    part of the first block's key, and of the others' by their number.
    """
    key = parent.to_bytes(parent_bytes, "little") + tokens
    return key + salt if parent == ROOT else key


def key_digest(key: bytes) -> bytes:
    """A name of 32 bytes for what is indexed under `key`."""
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()


class IndexEntry(NamedTuple):
    """An indexed block: number of the content before it, its int32 tokens, and the salt."""

    block: int
    parent: int
    tokens: bytes
    salt: bytes


class PrefixIndex:
    """Finds blocks by the tokens from the start of the sequence up to their end.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        durable: whether the numbers of content are digests, good for content below the GPU.

    Attributes:
        block_size: tokens per block.
        on_discard: called with block and key when indexed content is about to be overwritten.
    """

    def __init__(self, num_blocks: int, block_size: int, *, durable: bool = False) -> None:
        self.on_discard: Callable[[int, bytes], None] | None = None
        self._durable = durable
        self._number_bytes = _DIGEST_BYTES if durable else _COUNTER_BYTES
        self.block_size = block_size
        self._block_bytes = block_size * np.dtype(np.int32).itemsize
        self._blocks: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_blocks
        self._numbers = [ROOT] * num_blocks
        self._next_number = ROOT + 1

    def __contains__(self, block: int) -> bool:
        return self._keys[block] is not None

    def __len__(self) -> int:
        return len(self._blocks)

    def number(self, block: int) -> int:
        """Number of the content of an indexed block."""
        return self._numbers[block]

    def contents(self) -> dict[int, bytes]:
        """The int32 tokens of every indexed block, as bytes."""
        tokens = slice(self._number_bytes, self._number_bytes + self._block_bytes)
        return {block: key[tokens] for key, block in self._blocks.items()}

    def entries(self) -> Iterator[IndexEntry]:
        """Every indexed block, with what it is indexed under."""
        start, end = self._number_bytes, self._number_bytes + self._block_bytes
        for key, block in self._blocks.items():
            parent = int.from_bytes(key[:start], "little")
            yield IndexEntry(block, parent, key[start:end], key[end:])

    def keys(self, tokens: bytes, before: bytes | None, salt: bytes) -> Iterator[bytes]:
        """What full blocks that follow each other are indexed under, here or elsewhere.

        Args:
            tokens: int32 token ids, as bytes.
            before: key of the block before them, None for the start of a sequence.
            salt: what the content depends on besides the tokens.
        """
        assert self._durable, "a counted number is known only to the block that holds the content"
        parent = ROOT if before is None else self._number_of(before)
        for part in self._split(tokens):
            key = block_key(parent, part, salt, self._number_bytes)
            yield key
            parent = self._number_of(key)

    def get(self, key: bytes) -> int | None:
        """The block that is indexed under `key`, if there is one."""
        return self._blocks.get(key)

    def restore(self, block: int, key: bytes) -> None:
        """A block that is not indexed gets content that no other block is indexed with."""
        assert key not in self._blocks and self._keys[block] is None
        self._put(block, key, self._number_of(key))

    def find(self, tokens: bytes, salt: bytes = b"") -> list[int]:
        """The blocks that hold the longest indexed prefix of `tokens`, in order.

        Only full blocks are ever indexed, so the result covers a multiple of the block size.

        Args:
            tokens: int32 token ids from the start of a sequence, as bytes.
            salt: what the content depends on besides the tokens.
        """
        found: list[int] = []
        parent = ROOT
        for part in self._split(tokens):
            block = self._blocks.get(block_key(parent, part, salt, self._number_bytes))
            if block is None:
                break
            found.append(block)
            parent = self._numbers[block]
        return found

    def add(self, blocks: Iterable[int], parent: int, tokens: bytes, salt: bytes = b"") -> int:
        """Index full blocks that follow each other, except where a twin is indexed already.

        A block that is indexed behind content which has been evicted since, so that nobody finds
        it, is indexed anew.

        Args:
            blocks: blocks that hold these tokens.
            parent: number of the content before them, ROOT if there is none.
            tokens: their int32 token ids, `len(blocks) * block_size` of them, as bytes.
            salt: what the content depends on besides the tokens.

        Returns:
            The number of the content of the last one, to be the parent of the next block.
        """
        for block, part in zip(blocks, self._split(tokens), strict=True):
            key = block_key(parent, part, salt, self._number_bytes)
            twin = self._blocks.get(key)
            if twin is None:
                self.discard(block)
                parent = self._number_of(key)
                self._put(block, key, parent)
            else:
                parent = self._numbers[twin]
        return parent

    def discard(self, block: int) -> None:
        """The block will hold something else; does nothing if it is not indexed."""
        key = self._keys[block]
        if key is not None:
            if self.on_discard is not None:
                self.on_discard(block, key)
            del self._blocks[key]
            self._keys[block] = None

    def clear(self) -> None:
        """Forget all content."""
        for block in self._blocks.values():
            self._keys[block] = None
        self._blocks.clear()

    def _number_of(self, key: bytes) -> int:
        """Number of content that is new to the index."""
        if self._durable:
            return int.from_bytes(key_digest(key), "little")
        self._next_number += 1
        return self._next_number - 1

    def _put(self, block: int, key: bytes, number: int) -> None:
        self._blocks[key] = block
        self._keys[block] = key
        self._numbers[block] = number

    def _split(self, tokens: bytes) -> Iterator[bytes]:
        """The tokens of each full block."""
        width = self._block_bytes
        return (tokens[end - width : end] for end in range(width, len(tokens) + 1, width))
