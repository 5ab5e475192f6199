"""Figures of a running engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from scheduler import Scheduler
from scheduler.tiers import Tiers
from scheduler.transfers import TierCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTierStats:
    """Blocks below the pool; all zero for an engine that has nothing there.

    Attributes:
        host_blocks_used: slots of host memory with content.
        host_blocks_total: slots of host memory.
        disk_blocks_used: files.
        disk_blocks_total: most files.
        counts: what has moved so far.
    """

    host_blocks_used: int = 0
    host_blocks_total: int = 0
    disk_blocks_used: int = 0
    disk_blocks_total: int = 0
    counts: TierCounts = field(default_factory=TierCounts)

    @staticmethod
    def of(tiers: Tiers | None) -> LowerTierStats:
        """A snapshot of the books."""
        if tiers is None:
            return LowerTierStats()
        return LowerTierStats(
            host_blocks_used=tiers.num_host_used,
            host_blocks_total=tiers.num_host_blocks,
            disk_blocks_used=tiers.num_disk_used,
            disk_blocks_total=tiers.num_disk_blocks,
            counts=dataclasses.replace(tiers.counts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of counts, cheap to take after every step.

    What takes a look at every block, fragmentation above all, is in `Engine.block_map`.

    Attributes:
        num_running: sequences that own KV blocks.
        num_waiting: sequences that wait for blocks or a place, preempted ones among them.
        blocks_used: KV blocks that belong to a sequence now.
        blocks_peak: most blocks that were in use at the end of any step.
        blocks_cached: KV blocks that are free and still hold a prefix.
        blocks_total: blocks that can be handed out; the null block is not among them.
        block_bytes: bytes of a block, over all layers.
        block_size: tokens of a block.
        pool_bytes: bytes of the whole pool.
        prefix_lookup_tokens: prompt tokens of the sequences admitted so far.
        prefix_hit_tokens: how many of these were in the cache.
        evictions: blocks with a cached prefix that were handed out for something else.
        blocks_copied: blocks copied because their sequence wrote to a shared one.
        preemptions: times a sequence lost its blocks.
        swaps: in how many of the preemptions host memory kept what was in them; in the others it
            had to be computed again.
        lower: host memory and disk.
        steps: steps launched.
        prompt_tokens: tokens of the prompts accepted.
        generated_tokens: tokens of the answers so far; a beam search adds those of its results.
        compiles_after_warmup: steps compiled after warm-up; any is a defect.
    """

    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_peak: int
    blocks_cached: int
    blocks_total: int
    block_bytes: int
    block_size: int
    pool_bytes: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    evictions: int
    blocks_copied: int
    preemptions: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    compiles_after_warmup: int
    swaps: int = 0
    lower: LowerTierStats = field(default_factory=LowerTierStats)

    @classmethod
    def of(cls, scheduler: Scheduler, block_bytes: int, **counts: int) -> EngineStats:
        """The figures that a scheduler knows, and `counts` for the others."""
        blocks, num_blocks = scheduler.blocks, scheduler.config.num_blocks
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocks_used=scheduler.num_used_blocks,
            blocks_cached=blocks.pool.num_cached,
            blocks_total=num_blocks - 1,
            block_bytes=block_bytes,
            block_size=scheduler.config.block_size,
            pool_bytes=block_bytes * num_blocks,
            prefix_lookup_tokens=blocks.admission.num_lookup_tokens,
            prefix_hit_tokens=blocks.admission.num_hit_tokens,
            evictions=blocks.pool.num_evicted,
            blocks_copied=blocks.num_copied,
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.num_swaps,
            lower=LowerTierStats.of(blocks.tiers),
            **counts,
        )

    @property
    def block_utilisation(self) -> float:
        """Share of the pool's blocks in use, 0 to 1."""
        return self.blocks_used / self.blocks_total

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were in the cache, 0 to 1; 0 before the first."""
        return self.prefix_hit_tokens / max(self.prefix_lookup_tokens, 1)

    @property
    def hit_rates(self) -> dict[str, float]:
        """`prefix_hit_rate` by where the tokens were found: the pool, host memory, the disk."""
        counts, size = self.lower.counts, self.block_size
        looked_up = max(self.prefix_lookup_tokens, 1)
        host, disk = counts.host_prompt_hits * size, counts.disk_prompt_hits * size
        return {
            "pool": (self.prefix_hit_tokens - host - disk) / looked_up,
            "host": host / looked_up,
            "disk": disk / looked_up,
        }

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes of blocks that were copied so far, by where from and to."""
        counts = self.lower.counts
        blocks = {
            "pool_to_pool": self.blocks_copied,
            "pool_to_host": counts.stored,
            "host_to_pool": counts.loaded,
            "host_to_disk": counts.spilled,
            "disk_to_host": counts.read,
        }
        return {path: count * self.block_bytes for path, count in blocks.items()}

    @property
    def peak_block_utilisation(self) -> float:
        """Highest `block_utilisation` at the end of any step."""
        return self.blocks_peak / self.blocks_total
