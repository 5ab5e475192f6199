"""`pagedjax info`: what a checkpoint is, and how much of it fits."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedjax.cli import options as opt
from pagedjax.cli.errors import reports_errors

if TYPE_CHECKING:
    from pagedjax.config import EngineConfig
    from pagedjax.models.arch import ArchConfig


@reports_errors
def info(
    model: opt.Model,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = None,
    memory_fraction: opt.MemoryFraction = None,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    host_cache_bytes: opt.HostCacheBytes = 0,
    disk_cache_path: opt.DiskCachePath = None,
    disk_cache_bytes: opt.DiskCacheBytes = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Architecture, parameters, and what an engine with these options makes of this machine.

    Nothing is loaded. The options are those of the engine that is to be started (`LLM`, or the
    other commands), since steps of another size leave another amount of memory to the KV pool.

    Example: `pagedjax info ./llama-1b`
    """
    from pagedjax.config import EngineConfig
    from pagedjax.loading import read_arch

    config = EngineConfig(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_fraction=memory_fraction,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        host_cache_bytes=host_cache_bytes,
        disk_cache_path=disk_cache_path,
        disk_cache_bytes=disk_cache_bytes,
    )
    arch = read_arch(model)
    facts = architecture(arch) | capacity(arch, config)
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        typer.echo(f"{name.replace('_', ' '):{width}}  {shown}")


def architecture(arch: ArchConfig) -> dict[str, Any]:
    """Facts that follow from the architecture alone."""
    from pagedjax.models import param_shapes

    windows = Counter(arch.windows)
    return {
        "family": arch.family,
        "parameters": sum(math.prod(shape) for shape in param_shapes(arch).values()),
        "layers": arch.layers,
        "embed": arch.embed,
        "q_heads": arch.q_heads,
        "kv_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "mlp": arch.mlp,
        "vocab": arch.vocab,
        "max_positions": arch.max_positions,
        "attention": ", ".join(
            f"{count} layers see {'all' if window is None else f'the last {window}'} positions"
            for window, count in windows.items()
        ),
    }


def capacity(arch: ArchConfig, config: EngineConfig) -> dict[str, Any]:
    """The plan of an engine with these options for the memory of this machine's first device."""
    import jax

    from pagedjax.engine.compilation_cache import enable_compilation_cache
    from pagedjax.engine.kv_pool import blocks_that_fit, check_memory, kv_spec
    from pagedjax.engine.scheduler_options import scheduler_config
    from pagedjax.engine.step_memory import planned_step_bytes
    from pagedjax.frontend import weights_dtype

    device = jax.devices()[0]
    config = config.resolved(platform=device.platform, max_positions=arch.max_positions)
    dtype = jax.numpy.dtype(weights_dtype(config.dtype) or "bfloat16")
    weights = architecture(arch)["parameters"] * dtype.itemsize
    enable_compilation_cache()
    step_bytes = planned_step_bytes(arch, config, dtype=dtype, device=device)
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None and config.memory_fraction is not None:
        # The engine finds the weights on the device; here they still have to be counted.
        share = config.memory_fraction - weights / stats["bytes_limit"]
        if share <= 0:
            raise ValueError(f"weights of {weights:,} bytes do not fit the device's memory")
        config = dataclasses.replace(config, memory_fraction=share)
    blocks = blocks_that_fit(
        arch, config, dtype=dtype, device=device, step_bytes=lambda: step_bytes
    )
    config = dataclasses.replace(config, num_blocks=blocks)
    spec = kv_spec(arch, config, num_blocks=blocks, dtype=dtype)
    if stats is not None:
        there = stats["bytes_limit"] - weights
        check_memory(spec, config, device_bytes=there, platform=device.platform)
    sizes = scheduler_config(config, arch, spec)
    return {
        "device": f"{device.platform}, {device.device_kind}",
        "weight_bytes": weights,
        "step_bytes": step_bytes,
        "max_num_seqs": sizes.max_num_seqs,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "longest_sequence": sizes.max_seq_len,
        "kv_dtype": spec.dtype_name,
        "kv_bytes_per_token": spec.block_bytes // spec.block_size,
        "kv_blocks": blocks - 1,
        "kv_pool_bytes": spec.pool_bytes,
        "tokens_that_fit": (blocks - 1) * spec.block_size,
        "host_tokens_that_fit": sizes.num_host_blocks * spec.block_size,
        "disk_tokens_that_fit": sizes.num_disk_blocks * spec.block_size,
    }
