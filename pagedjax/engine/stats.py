"""Figures of a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot, cheap to take at any time.

    Attributes:
        num_running: sequences that own KV blocks.
        num_waiting: sequences that wait for blocks or a place, preempted ones among them.
        blocks_used: KV blocks that belong to a sequence now.
        blocks_peak: most blocks that were in use at the end of any step.
        blocks_total: blocks that can be handed out; the null block is not among them.
        preemptions: times a sequence lost its blocks and had to be computed again.
        steps: steps launched.
        prompt_tokens: tokens of the prompts accepted.
        generated_tokens: tokens handed to callers.
        compiles_after_warmup: steps compiled after warm-up; any is a defect.
    """

    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_peak: int
    blocks_total: int
    preemptions: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    compiles_after_warmup: int

    @property
    def block_utilisation(self) -> float:
        """Share of the pool's blocks in use, 0 to 1."""
        return self.blocks_used / self.blocks_total

    @property
    def peak_block_utilisation(self) -> float:
        """Highest `block_utilisation` at the end of any step."""
        return self.blocks_peak / self.blocks_total
