"""Tile sizes and schedules of the kernels, chosen by shape.

`tuned/<device>.json` holds what `python -m benchmarks.bench_kernels` measured as the best; shapes
outside that table get a heuristic.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from importlib import resources
from typing import Any, Literal

import jax

Backend = Literal["mosaic", "triton"]
# Rows of keys (tokens times key/value heads) from which a kernel writes them faster than XLA's
# scatter does, on an H200: 3.3 us against 3.8 for 64 tokens of 8 heads, 21 against 141 for 8192.
WRITE_KERNEL_ROWS = 256
SMEM_BYTES = 227 << 10  # of one thread block on Hopper
# Weighted values of a key/value head's queries that the Mosaic decode kernel holds in registers:
# 64 for each of 128 threads, beside as many scores.
MOSAIC_SUMS = 64 * 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Schedule of a decode kernel.

    Attributes:
        tile: keys per iteration.
        stages: tiles of keys and values in flight per thread block.
        workers: thread blocks of the persistent grid, at most.
        num_warps: warps per thread block (Triton; Mosaic's are fixed).
    """

    tile: int
    stages: int
    workers: int
    num_warps: int = 4

    def __post_init__(self) -> None:
        if self.tile < 16 or self.tile & (self.tile - 1):
            raise ValueError(f"tile must be a power of two of at least 16, got {self.tile}")
        if self.stages < 1 or self.workers < 1:
            raise ValueError(f"stages and workers must be positive, got {self}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be a power of two up to 16, got {self.num_warps}")

    def parts(self, kv_heads: int) -> int:
        """Rows of the plan: each is worked off by one thread block per key/value head."""
        return max(1, self.workers // kv_heads)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicPrefillConfig:
    """Tile sizes and schedule of the Mosaic prefill kernel.

    Attributes:
        block_kv: keys per tile, 64 or 128.
        stages: tiles of keys (and of values) in flight.
        thread_blocks: size of the persistent grid, the number of multiprocessors.
        head_sections: the query heads are worked off in this many equal parts, so that the keys
            of one part stay in the L2 cache.
        separate_output: stage the output in its own shared memory instead of the query's; the
            next item's query can then load while the output is being written.
    """

    block_kv: int
    stages: int = 2
    thread_blocks: int = 132
    head_sections: int = 1
    separate_output: bool = True

    def __post_init__(self) -> None:
        if self.block_kv not in (64, 128):
            raise ValueError(f"block_kv must be 64 or 128, got {self.block_kv}")
        if self.stages < 1 or self.thread_blocks < 1 or self.head_sections < 1:
            raise ValueError(f"stages, thread_blocks and head_sections must be positive: {self}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TritonPrefillConfig:
    """Tile sizes of the Triton prefill kernel.

    Attributes:
        rows: (token, head) pairs of one program; at least the group, rounded up to a power of two.
        block_kv: keys per iteration.
        num_warps: warps of one program; 8 for 128 rows, or the accumulators spill.
        num_stages: tiles of keys in flight.
    """

    rows: int = 128
    block_kv: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("rows", "block_kv"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {value}")


def decode_config(
    backend: Backend, q: jax.Array, kv_pool: jax.Array, block_tables: jax.Array
) -> DecodeConfig:
    """The tuned configuration of the nearest case, or a heuristic one.

    Args:
        backend: kernel that it is for.
        q: as for `paged_decode_attention`; only its shape counts, as for the other arrays.
        kv_pool: `[blocks, 2, kv_heads, block_size, head_dim]`.
        block_tables: `[seqs, max_blocks]`.
    """
    case = _case(q, kv_pool)
    best = nearest_case(decode_table(device_kind()), case, q.shape[0], backend)
    head_dim, itemsize = q.shape[-1], kv_pool.dtype.itemsize
    rows = q.size // (q.shape[0] * kv_pool.shape[2] * head_dim)
    if best is None:
        return default_decode_config(backend, rows, head_dim, itemsize, core_count())
    config = DecodeConfig(**best["config"])
    if backend == "triton":
        return config
    per_core = max(1, config.workers // core_count())
    stages = _mosaic_stages(config.tile, rows, head_dim, itemsize, SMEM_BYTES // min(per_core, 2))
    return dataclasses.replace(config, stages=max(1, min(config.stages, stages)))


def default_decode_config(
    backend: Backend, rows: int, head_dim: int, kv_itemsize: int, cores: int
) -> DecodeConfig:
    """Configuration for a shape outside the table: as many bytes in flight as fit.

    Args:
        backend: kernel that it is for.
        rows: queries of a sequence that share a key/value head.
        head_dim: width of a head.
        kv_itemsize: bytes of a number in the pool.
        cores: multiprocessors of the device.
    """
    if backend == "triton":
        tile = 32 if head_dim * kv_itemsize > 256 else 64
        # Shared memory must hold the stages and the queries.
        stages = 3 if 3 * 2 * tile * head_dim * kv_itemsize <= 160 << 10 else 2
        return DecodeConfig(tile=tile, stages=stages, workers=2 * cores)
    # Widening 8 bits takes a thread block's time: a second one uses the memory meanwhile.
    per_core = 2 if kv_itemsize == 1 else 1
    for tile in (64,) if kv_itemsize == 1 else (128, 64):
        stages = _mosaic_stages(tile, rows, head_dim, kv_itemsize, SMEM_BYTES // per_core)
        if stages >= 3:
            break
    return DecodeConfig(tile=tile, stages=max(2, min(stages, 6)), workers=per_core * cores)


def _mosaic_stages(tile: int, rows: int, head_dim: int, kv_itemsize: int, room: int) -> int:
    """How many tiles of keys and values fit into `room` bytes of shared memory."""
    left = room - mosaic_fixed_bytes(rows, head_dim, tile)
    return left // (2 * tile * head_dim * kv_itemsize)


def mosaic_prefill_config(
    tokens: int, q_heads: int, kv_heads: int, head_dim: int, tile_rows: int
) -> MosaicPrefillConfig:
    """Configuration of the Mosaic prefill kernel for a shape.

    Args:
        tokens: rows of the flat query array.
        q_heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        tile_rows: query rows of one work item.
    """
    small = head_dim <= 128
    items = -(-tokens // tile_rows) * q_heads
    blocks = core_count()
    # Each section of the heads ends a little out of balance: at least 15 rounds in each.
    sections = 1
    while kv_heads % (2 * sections) == 0 and items >= 15 * 2 * sections * blocks:
        sections *= 2
    return MosaicPrefillConfig(
        block_kv=128 if small else 64,
        thread_blocks=blocks,
        head_sections=sections,
        separate_output=small,
    )


def triton_prefill_config(head_dim: int, itemsize: int) -> TritonPrefillConfig:
    """Configuration of the Triton prefill kernel for queries of `itemsize` bytes a number."""
    if itemsize > 2:
        return TritonPrefillConfig(rows=64, block_kv=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return TritonPrefillConfig(block_kv=32, num_stages=2)
    return TritonPrefillConfig()


def mosaic_fixed_bytes(rows: int, head_dim: int, tile: int) -> int:
    """Shared memory of a thread block of the Mosaic kernel besides its stages, at most."""
    columns = 8 * -(-(rows + 7) // 8)
    queries_and_outputs = columns * (4 * head_dim + 2 * tile + 4)
    return queries_and_outputs + (5 << 10)  # reductions, barriers, alignment


def fastest_decode_backend(q: jax.Array, kv_pool: jax.Array) -> Backend:
    """The backend to try first: what the table measured as the fastest for such a shape.

    Outside the table it is Mosaic; for several queries of each sequence Triton, the only one that
    was measured with them.
    """
    if q.ndim == 4:
        return "triton"
    best = nearest_case(decode_table(device_kind()), _case(q, kv_pool), q.shape[0], None)
    return "mosaic" if best is None else best["backend"]


def nearest_case(
    table: list[dict[str, Any]], case: dict[str, Any], seqs: int, backend: Backend | None
) -> dict[str, Any] | None:
    """The entry of the same heads and dtype whose batch is nearest (in ratio), fastest first."""
    fits = [
        entry
        for entry in table
        if all(entry[key] == value for key, value in case.items())
        and (entry["backend"] == backend if backend else entry["fastest"])
    ]

    def distance(entry: dict[str, Any]) -> float:
        return max(entry["seqs"], seqs) / min(entry["seqs"], seqs)

    return min(fits, key=distance, default=None)


@functools.cache
def decode_table(kind: str) -> list[dict[str, Any]]:
    """Measured decode configurations of a device; empty for a device that was never tuned."""
    path = resources.files("pallas_kernels") / "tuned" / f"{table_name(kind)}.json"
    return json.loads(path.read_text())["decode"] if path.is_file() else []


def table_name(kind: str) -> str:
    """File name of a device's table: `NVIDIA H200` is `nvidia_h200`."""
    return re.sub(r"\W+", "_", kind.lower())


def device_kind() -> str:
    """Name of the default device, as its vendor spells it."""
    return jax.devices()[0].device_kind


def core_count() -> int:
    """Multiprocessors of the default device; those of an H100 or H200 when there is no GPU."""
    return int(getattr(jax.devices()[0], "core_count", None) or 132)


def _case(q: jax.Array, kv_pool: jax.Array) -> dict[str, Any]:
    return {
        "q_heads": q.shape[-2],
        "kv_heads": kv_pool.shape[2],
        "head_dim": q.shape[-1],
        "kv_dtype": kv_pool.dtype.name,
    }
