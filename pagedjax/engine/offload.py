"""Copies whole blocks between the KV pool on the device and pinned memory of the host.

A block in host memory is one array: its bytes in all layers, one layer after another. Blocks that
leave the pool are gathered on the device, a batch per launch, and sent from there; blocks that
come back are sent first and then scattered into the pool. The gathers and scatters run in the
order of launch with the steps, so that none reads what is not written yet or overwrites what is
still to be read. The transfers run beside them, on the copy engines of a GPU: a step waits only
for the scatters before it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from pagedjax.engine.array_copies import copy_arrays
from pagedjax.engine.kv_pool import TRANSFER_BYTES, KVPool

BATCH_SIZES = (1, 4, 16, 64)
"""Blocks that one compiled gather or scatter takes."""

STAGED_BYTES = TRANSFER_BYTES * 2 // 3
"""Device memory for copies under way, if two blocks fit; the rest is for prefetched blocks."""

_WORD = np.dtype(np.uint32)


def gather_blocks(pool: KVPool, blocks: Int[Array, " n"]) -> tuple[UInt32[Array, " words"], ...]:
    """The bytes of some blocks, each over all layers. Pure.

    Args:
        pool: arrays whose first axis is the block, with a multiple of four bytes in each block.
        blocks: which.
    """
    parts = [_to_words(layer[blocks]) for layer in jax.tree.leaves(pool)]
    words = jnp.concatenate(parts, axis=1)
    return tuple(words[at] for at in range(blocks.shape[0]))


def scatter_blocks(
    pool: KVPool, blocks: Int[Array, " n"], contents: Sequence[UInt32[Array, " words"]]
) -> tuple[KVPool, Int[Array, ""]]:
    """The pool with the bytes of some blocks replaced. Pure; donate the pool.

    Args:
        pool: arrays whose first axis is the block.
        blocks: which, each once.
        contents: for each of them, as from `gather_blocks`.

    Returns:
        The pool, and a number that is there once it has been written.
    """
    words = jnp.stack(contents)
    layers, tree = jax.tree.flatten(pool)
    start = 0
    for index, layer in enumerate(layers):
        size = _block_words(layer)
        new = _from_words(words[:, start : start + size], layer.shape[1:], layer.dtype)
        layers[index] = layer.at[blocks].set(new, unique_indices=True)
        start += size
    return jax.tree.unflatten(tree, layers), blocks.sum()


def pinned_memory(device: Any) -> jax.sharding.SingleDeviceSharding:
    """Where arrays are that the device copies to and from without a detour.

    Raises:
        ValueError: the device has no such memory.
    """
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        raise ValueError(f"host_cache_bytes needs pinned host memory; {device} has {kinds}")
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Measured rates between device and host, in bytes per second."""

    store_bytes_per_s: float
    load_bytes_per_s: float


class BlockMover:
    """Slots of host memory, and the copies between them and the pool. Never waits for a step.

    It does wait for transfers when more than `STAGED_BYTES` are on their way, so that a long
    sequence can be swapped with little device memory to spare.

    Args:
        pool: abstract arrays of the pool, with their shardings.
        num_slots: blocks that the host memory holds.

    Attributes:
        block_bytes: of one block over all layers.
        compiles_after_warmup: copies that had to be compiled after `warm_up`; any is a defect.

    Raises:
        ValueError: the device has no pinned host memory, or a block's bytes can not be taken as
            words of four.
    """

    def __init__(self, pool: Any, num_slots: int) -> None:
        self._pool = pool
        layers = jax.tree.leaves(pool)
        self._on_device = layers[0].sharding
        (self._device,) = self._on_device.device_set
        self._on_host = pinned_memory(self._device)
        for layer in layers:
            size = int(np.prod(layer.shape[1:])) * layer.dtype.itemsize
            if size % _WORD.itemsize:
                raise ValueError(f"a block of {layer.shape[1:]} {layer.dtype} has {size} bytes")
        self._words = sum(map(_block_words, layers))
        self.block_bytes = self._words * _WORD.itemsize
        most = min(STAGED_BYTES // self.block_bytes // 2, layers[0].shape[0])
        self.sizes = tuple(n for n in BATCH_SIZES if n <= most) or BATCH_SIZES[:1]
        self._slots: list[jax.Array | None] = [None] * num_slots
        self._ahead: dict[int, jax.Array] = {}  # prefetched to the device, by slot
        self._staged: deque[tuple[Any, int]] = deque()  # what to wait for, and its bytes
        self._staged_bytes = 0
        self._gathers: dict[int, Any] = {}
        self._scatters: dict[int, Any] = {}
        self._warm = False
        self.compiles_after_warmup = 0

    def warm_up(self) -> None:
        """Compile every copy, and take the host memory from the system.

        Raises:
            ValueError: there is not so much memory that can be pinned.
        """
        for size in self.sizes:
            self._gather(size)
            self._scatter(size)
        self._warm = True
        if self._device.platform == "cpu":
            return
        blank = np.zeros(self._words, _WORD)
        try:
            # Pinning memory is slow. What is freed here is kept by the allocator.
            arrays = [jax.device_put(blank, self._on_host) for _ in self._slots]
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"host_cache_bytes: {len(self._slots)} blocks of {self.block_bytes} bytes can not "
                f"be pinned (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB limits it): {error}"
            ) from error

    def store(self, pool: KVPool, pairs: np.ndarray) -> None:
        """Copy blocks of the pool to slots, as they are after all that has been launched.

        Args:
            pool: the arrays.
            pairs: int32[num_stores, 2], blocks and slots, each slot once.
        """
        for part in self._batches(pairs):
            self._make_room(len(part))
            gathered = self._gather(len(part))(pool, part[:, 0].copy())
            arrays = copy_arrays(gathered, self._on_host)
            self._note(arrays, len(part))
            for slot, array in zip(part[:, 1].tolist(), arrays, strict=True):
                self._slots[slot] = array
                self._ahead.pop(slot, None)

    def load(self, pool: KVPool, pairs: np.ndarray) -> KVPool:
        """The pool with slots copied to blocks; the pool that is given is consumed.

        Args:
            pool: the arrays.
            pairs: int32[num_loads, 2], slots that are filled and blocks, each block once.
        """
        sent: tuple[np.ndarray, list[jax.Array]] | None = None
        for part in self._batches(pairs):
            self._make_room(len(part) + (0 if sent is None else len(sent[0])))
            arrays = self._send(part[:, 0].tolist())
            # Only now: a transfer waits for everything that was launched before it.
            if sent is not None:
                pool = self._put(pool, *sent)
            sent = part, arrays
        if sent is not None:
            pool = self._put(pool, *sent)
            self._ahead.clear()
        return pool

    def prefetch(self, slots: Iterable[int]) -> None:
        """Send slots to the device that the next `load` will want, as far as there is room."""
        room = STAGED_BYTES // self.block_bytes // 2 - len(self._ahead)
        wanted = [slot for slot in slots if slot not in self._ahead][: max(room, 0)]
        arrays = copy_arrays([self.content(slot) for slot in wanted], self._on_device)
        self._ahead.update(zip(wanted, arrays, strict=True))

    def content(self, slot: int) -> jax.Array:
        """What is in a slot, uint32[block_bytes / 4] in host memory."""
        array = self._slots[slot]
        assert array is not None, f"slot {slot} is read before it is filled"
        return array

    def fill(self, slot: int, content: np.ndarray) -> None:
        """Put bytes into a slot, uint8[block_bytes]; they are not to be changed later."""
        self._slots[slot] = jax.device_put(content.view(_WORD), self._on_host)
        self._ahead.pop(slot, None)

    def measure(self, pool: KVPool) -> tuple[KVPool, LinkRates]:
        """Time both directions with one batch of whatever is in the pool, which does not change.

        The pool that is given is consumed; a block's first slots must not be in use.
        """
        size = self.sizes[-1]
        ids = np.arange(size, dtype=np.int32)
        gather, scatter = self._gather(size), self._scatter(size)
        stores, loads = [], []
        for _ in range(4):  # the first one is slower: memory is taken, code is loaded
            gathered = jax.block_until_ready(gather(pool, ids))
            start = time.perf_counter()
            arrays = jax.block_until_ready(copy_arrays(gathered, self._on_host))
            stored = time.perf_counter()
            pool, done = scatter(pool, ids, copy_arrays(arrays, self._on_device))
            done.block_until_ready()
            loads.append(time.perf_counter() - stored)
            stores.append(stored - start)
        size_bytes = size * self.block_bytes
        return pool, LinkRates(
            store_bytes_per_s=size_bytes / min(stores), load_bytes_per_s=size_bytes / min(loads)
        )

    def _put(self, pool: KVPool, pairs: np.ndarray, arrays: list[jax.Array]) -> KVPool:
        """The pool with what was sent of the slots in their blocks."""
        pool, done = self._scatter(len(pairs))(pool, pairs[:, 1].copy(), arrays)
        self._note(done, len(pairs))
        return pool

    def _send(self, slots: list[int]) -> list[jax.Array]:
        """Slots on the device, those that were prefetched without another transfer."""
        missing = [slot for slot in slots if slot not in self._ahead]
        sent = copy_arrays([self.content(slot) for slot in missing], self._on_device)
        arrays = self._ahead | dict(zip(missing, sent, strict=True))
        return [arrays[slot] for slot in slots]

    def _batches(self, pairs: np.ndarray) -> Iterable[np.ndarray]:
        """Parts of `pairs` of the sizes that are compiled, largest first."""
        start = 0
        for size in reversed(self.sizes):
            while len(pairs) - start >= size:
                yield pairs[start : start + size]
                start += size

    def _make_room(self, num_blocks: int) -> None:
        """Wait until so many blocks more may be on their way."""
        needed = num_blocks * self.block_bytes
        while self._staged and self._staged_bytes + needed > STAGED_BYTES:
            arrays, size = self._staged.popleft()
            jax.block_until_ready(arrays)
            self._staged_bytes -= size

    def _note(self, arrays: Any, num_blocks: int) -> None:
        self._staged.append((arrays, num_blocks * self.block_bytes))
        self._staged_bytes += num_blocks * self.block_bytes

    def _gather(self, size: int) -> Any:
        if size not in self._gathers:
            self.compiles_after_warmup += self._warm
            traced = jax.jit(gather_blocks).lower(self._pool, self._ids(size))
            self._gathers[size] = traced.compile()
        return self._gathers[size]

    def _scatter(self, size: int) -> Any:
        if size not in self._scatters:
            self.compiles_after_warmup += self._warm
            content = jax.ShapeDtypeStruct((self._words,), _WORD, sharding=self._on_device)
            jitted = jax.jit(scatter_blocks, donate_argnums=(0,))
            traced = jitted.lower(self._pool, self._ids(size), [content] * size)
            self._scatters[size] = traced.compile()
        return self._scatters[size]

    def _ids(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self._on_device)


def _block_words(layer: Any) -> int:
    """Words of one block in one array of the pool."""
    return int(np.prod(layer.shape[1:])) * layer.dtype.itemsize // _WORD.itemsize


def _to_words(blocks: jax.Array) -> UInt32[Array, "n words"]:
    """Blocks of one layer as bytes, four to a word."""
    flat = blocks.reshape(blocks.shape[0], -1)
    per_word = _WORD.itemsize // flat.dtype.itemsize
    if per_word > 1:
        flat = flat.reshape(flat.shape[0], -1, per_word)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(blocks.shape[0], -1)


def _from_words(
    words: UInt32[Array, "n words"], shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """The inverse of `_to_words`."""
    return jax.lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], *shape)
