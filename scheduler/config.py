"""Sizes and budgets of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZES = (16, 32, 64, 128)
PREEMPTION = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and budgets; checks itself.

    Attributes:
        num_blocks: KV blocks in the pool, the null block 0 included.
        max_model_len: longest sequence of the model in tokens, prompt and output together.
        block_size: tokens per block: 16, 32, 64 or 128.
        max_num_seqs: most running sequences, most sequences of a step and most sample rows of
            a step.
        max_num_batched_tokens: most tokens computed in one step.
        max_prefill_chunk: most tokens of one sequence in one step; None for no limit but the
            step's. Smaller chunks let the decodes of a mixed step finish sooner.
        ttft_target_s: seconds in which a request is to have its first token. When not all can,
            the most that can are served before the others (`scheduler.deadlines`), instead of in
            order of arrival. None if nobody waits for a first token.
        prefix_caching: whether the keys and values of a prefix seen before are used again.
        contiguous_blocks: whether free blocks are kept as runs and handed out as such
            (`scheduler.free_lists`). Worth its time where blocks are copied in runs.
        window: how many latest positions a token sees, itself included, in every layer of the
            model; sequences give up blocks that have left it. None if a layer sees all.
        num_host_blocks: blocks of host memory that hold what leaves the pool; 0 for none.
        num_disk_blocks: most blocks on a disk, which holds what leaves host memory; 0 for none.
        preemption: how a sequence that has lost its blocks comes back: "recompute" its tokens,
            "swap" its blocks to host memory and back while there is room, or "auto" for what
            `Scheduler.swap_cost` says is faster. Beams always recompute.

    Raises:
        ValueError: a size is out of range.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_prefill_chunk: int | None = None
    ttft_target_s: float | None = None
    prefix_caching: bool = True
    contiguous_blocks: bool = False
    window: int | None = None
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    preemption: str = "auto"

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size}")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (the null block and one more), "
                f"got {self.num_blocks}"
            )
        if self.max_model_len < 2:
            raise ValueError(
                f"max_model_len must be at least 2 (one prompt token and one output token), "
                f"got {self.max_model_len}"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_host_blocks", "num_disk_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.num_disk_blocks and not self.num_host_blocks:
            raise ValueError(
                f"{self.num_disk_blocks} blocks on a disk need host memory to get there, "
                f"got num_host_blocks=0"
            )
        if self.preemption not in PREEMPTION:
            raise ValueError(f"preemption must be one of {PREEMPTION}, got {self.preemption!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            raise ValueError(f"max_prefill_chunk must be at least 1, got {self.max_prefill_chunk}")
        if self.ttft_target_s is not None and not self.ttft_target_s > 0:
            raise ValueError(f"ttft_target_s must be positive, got {self.ttft_target_s}")

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool can hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that model and pool both allow, prompt and output together."""
        return min(self.max_model_len, self.pool_tokens)

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of a block table."""
        return -(-self.max_seq_len // self.block_size)

    def num_passed_at(self, position: int) -> int:
        """How many of its first blocks a sequence needs no more for tokens from `position` on."""
        if self.window is None:
            return 0
        # At least one block that is full of written tokens is left.
        window = max(self.window, self.block_size + 1)
        return max(position - window + 1, 0) // self.block_size
