"""The pooled KV cache: how large it is, and its arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.models.arch import ArchConfig
from pallas_kernels.pool_parts import Pool

# One array per layer, `[blocks, 2, kv_heads, block_size, head_dim]`, or a pair for keys and values
# of different dtypes: a list rather than one array with a layer axis, so that each is updated in
# place without slicing a larger one.
KVPool = list[Pool]

# What `EngineConfig.kv_cache_dtype` names; "auto" is the dtype of the weights.
COMPRESSED_DTYPES = {"fp8": np.dtype(jnp.float8_e4m3fn), "int8": np.dtype(np.int8)}
_VALUES_ONLY = "-values"

# Device memory for blocks on their way between device and host, where there is a host cache.
TRANSFER_BYTES = 384 << 20

# Where Linux tells a container's memory limit: control groups version 2, then version 1.
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Shape of the pool.

    Attributes:
        layers: of the model.
        num_blocks: physical blocks, block 0 (the null block, for padding) included.
        kv_heads: key/value heads.
        block_size: tokens per block.
        head_dim: width of a head.
        dtype: of values as they are stored, and of keys.
        key_dtype: of keys that are stored in another dtype, in arrays of their own; else None.
    """

    layers: int
    num_blocks: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: np.dtype
    key_dtype: np.dtype | None = None

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """Those of a layer: one with keys at 0 and values at 1 of axis 1, or keys and values."""
        tail = (self.kv_heads, self.block_size, self.head_dim)
        if self.key_dtype is None:
            return [jax.ShapeDtypeStruct((self.num_blocks, 2, *tail), self.dtype)]
        shape = (self.num_blocks, 1, *tail)
        return [jax.ShapeDtypeStruct(shape, dtype) for dtype in (self.key_dtype, self.dtype)]

    @property
    def is_compressed(self) -> bool:
        """Whether values, at least, are stored divided by scales."""
        return self.dtype in COMPRESSED_DTYPES.values()

    @property
    def dtype_name(self) -> str:
        """For people: `bfloat16`, or `bfloat16 keys, int8 values`."""
        if self.key_dtype is None:
            return self.dtype.name
        return f"{self.key_dtype.name} keys, {self.dtype.name} values"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        per_layer = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in self.arrays)
        return self.layers * per_layer

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks, the null block included."""
        return self.num_blocks * self.block_bytes

    def create(self, device: Any) -> KVPool:
        """Zeroed arrays on `device`, a `jax.Device`."""
        return self.pool_of(
            [jnp.zeros(x.shape, x.dtype, device=device) for _ in range(self.layers)
             for x in self.arrays]
        )  # fmt: skip

    def pool_of(self, arrays: Sequence[jax.Array]) -> KVPool:
        """A pool of the arrays of all layers, those of a layer next to each other."""
        if self.key_dtype is None:
            return list(arrays)
        return list(zip(arrays[::2], arrays[1::2], strict=True))


def value_dtype(kv_cache_dtype: str) -> np.dtype | None:
    """What `EngineConfig.kv_cache_dtype` compresses values to; None if it does not."""
    return COMPRESSED_DTYPES.get(kv_cache_dtype.removesuffix(_VALUES_ONLY))


def keeps_keys(kv_cache_dtype: str) -> bool:
    """Whether `EngineConfig.kv_cache_dtype` leaves keys as they are."""
    return value_dtype(kv_cache_dtype) is None or kv_cache_dtype.endswith(_VALUES_ONLY)


def kv_spec(arch: ArchConfig, config: EngineConfig, *, num_blocks: int, dtype: np.dtype) -> KVSpec:
    """The pool of `arch` with `num_blocks` blocks.

    Args:
        arch: the model.
        config: options.
        num_blocks: blocks, the null block included.
        dtype: of the weights, and of what is not compressed.
    """
    compressed = value_dtype(config.kv_cache_dtype)
    keeps = compressed is not None and keeps_keys(config.kv_cache_dtype)
    return KVSpec(
        layers=arch.layers,
        num_blocks=num_blocks,
        kv_heads=arch.kv_heads,
        block_size=config.block_size,
        head_dim=arch.head_dim,
        dtype=np.dtype(dtype) if compressed is None else compressed,
        key_dtype=np.dtype(dtype) if keeps else None,
    )


def blocks_that_fit(
    arch: ArchConfig,
    config: EngineConfig,
    *,
    dtype: np.dtype,
    device: Any,
    step_bytes: Callable[[], int],
) -> int:
    """Size of the pool in blocks: given, or what the memory fraction leaves.

    On a GPU the fraction covers everything this process holds, the weights that are there already
    and what steps need besides included. The pool never exceeds what `max_num_seqs` sequences of
    `max_model_len` tokens can use.

    Args:
        arch: the model.
        config: resolved options.
        dtype: of the weights.
        device: the `jax.Device` where the pool will be.
        step_bytes: memory that steps need besides weights and pool, asked for only on a GPU.

    Raises:
        ValueError: not even one block of data fits, or less than what was asked for (see
            `check_memory`).
    """
    num_blocks = config.num_blocks or _fitting_blocks(arch, config, dtype, device, step_bytes)
    spec = kv_spec(arch, config, num_blocks=num_blocks, dtype=dtype)
    check_memory(spec, config, device_bytes=free_device_bytes(device), platform=device.platform)
    return num_blocks


def check_memory(spec: KVSpec, config: EngineConfig, *, device_bytes: int, platform: str) -> None:
    """Refuse a pool, a host cache or block tables larger than the memory, before any is made.

    On a CPU all lie in the same memory.

    Args:
        spec: of the pool.
        config: resolved options, which say how large the others are to be.
        device_bytes: what the device has for the pool.
        platform: of the device.

    Raises:
        ValueError: one of them does not fit; the text names the bytes wanted and there.
    """
    if spec.pool_bytes > device_bytes:
        raise ValueError(
            f"num_blocks: {spec.num_blocks} blocks of {spec.block_bytes} bytes take "
            f"{spec.pool_bytes} bytes, the device has {device_bytes} for them"
        )
    host_bytes = host_memory_bytes() - (spec.pool_bytes if platform == "cpu" else 0)
    if config.host_cache_bytes > host_bytes:
        raise ValueError(
            f"host_cache_bytes is {config.host_cache_bytes}, the host has {host_bytes} bytes"
        )
    assert config.max_num_seqs and config.max_model_len
    table_bytes = -(-config.max_model_len // spec.block_size) * np.dtype(np.int32).itemsize
    if config.max_num_seqs * table_bytes > host_bytes - config.host_cache_bytes:
        raise ValueError(
            f"max_num_seqs is {config.max_num_seqs}: block tables of {table_bytes} bytes each take "
            f"{config.max_num_seqs * table_bytes} bytes, the host has "
            f"{host_bytes - config.host_cache_bytes} left"
        )


def free_device_bytes(device: Any) -> int:
    """Memory of a device that is not in use; on a CPU, all memory of the machine.

    Args:
        device: a `jax.Device`.
    """
    stats = _memory_stats(device)
    return host_memory_bytes() if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


def _fitting_blocks(
    arch: ArchConfig,
    config: EngineConfig,
    dtype: np.dtype,
    device: Any,
    step_bytes: Callable[[], int],
) -> int:
    """What the memory fraction leaves, in blocks; arguments as of `blocks_that_fit`."""
    assert config.max_model_len and config.max_num_seqs and config.memory_fraction
    budget = _memory_budget(config, device, step_bytes)
    if config.host_cache_bytes and device.platform != "cpu":
        budget -= TRANSFER_BYTES
    block_bytes = kv_spec(arch, config, num_blocks=1, dtype=dtype).block_bytes
    useful = 1 + config.max_num_seqs * -(-config.max_model_len // config.block_size)
    fitting = min(_rounded(budget // block_bytes), useful)
    if fitting < 2:
        raise ValueError(
            f"the KV pool needs at least 2 blocks of {block_bytes} bytes; memory_fraction "
            f"{config.memory_fraction} leaves {max(budget, 0)} bytes"
        )
    return fitting


def _rounded(blocks: int) -> int:
    """Down, by less than 0.2 %: a few bytes more or less in use do not make other programs."""
    shift = max(blocks.bit_length() - 10, 0)
    return blocks >> shift << shift


def _memory_budget(config: EngineConfig, device: Any, step_bytes: Callable[[], int]) -> int:
    fraction = config.memory_fraction or 0.0
    stats = _memory_stats(device)
    if stats is None:
        return int(host_memory_bytes() * fraction)
    return int(stats["bytes_limit"] * fraction) - stats["bytes_in_use"] - step_bytes()


def _memory_stats(device: Any) -> Any:
    """What a device says of its memory; None for a CPU, which says nothing useful."""
    return device.memory_stats() if device.platform != "cpu" else None


def host_memory_bytes(limits: Sequence[Path] = CONTAINER_LIMITS) -> int:
    """Memory of this machine, or what its container may take if that is less.

    Args:
        limits: files that hold a container's limit in bytes; `max` and absent ones mean none.
    """
    found = [path.read_text().strip() for path in limits if path.is_file()]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(limit) for limit in found if limit != "max")])
