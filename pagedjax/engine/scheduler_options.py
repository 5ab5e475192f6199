"""From the options of an engine to those of its scheduler: bytes become blocks."""

from __future__ import annotations

from pagedjax.config import EngineConfig
from pagedjax.engine.disk_tier import file_bytes
from pagedjax.engine.kv_pool import KVSpec
from pagedjax.models.arch import ArchConfig
from scheduler import SchedulerConfig


def scheduler_config(config: EngineConfig, arch: ArchConfig, spec: KVSpec) -> SchedulerConfig:
    """The scheduler's part of resolved options, for a pool whose blocks are as `spec` says.

    Raises:
        ValueError: the host or the disk is to be used and can not hold a block.
    """
    block_file = file_bytes(spec.block_bytes, spec.block_size)
    if 0 < config.host_cache_bytes < spec.block_bytes:
        raise ValueError(
            f"host_cache_bytes is to hold a block, at least {spec.block_bytes}; "
            f"got {config.host_cache_bytes}"
        )
    if 0 < config.disk_cache_bytes < block_file:
        raise ValueError(
            f"disk_cache_bytes is to hold the file of a block, at least {block_file}; "
            f"got {config.disk_cache_bytes}"
        )
    windows = [window for window in arch.windows if window is not None]
    assert config.num_blocks and config.max_model_len
    assert config.max_num_seqs and config.max_num_batched_tokens
    return SchedulerConfig(
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        ttft_target_s=config.ttft_target_s,
        prefix_caching=config.prefix_caching,
        contiguous_blocks=config.contiguous_blocks,
        num_host_blocks=config.host_cache_bytes // spec.block_bytes,
        num_disk_blocks=config.disk_cache_bytes // block_file,
        preemption=config.preemption,
        # A block belongs to all layers: it is needed as long as one of them sees it.
        window=max(windows) if len(windows) == arch.layers else None,
    )
