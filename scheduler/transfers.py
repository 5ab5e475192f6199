"""What moves between the tiers of the KV cache, how much has, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.plan import Int32


class FileWrite(NamedTuple):
    """Write what is in a slot to the file of `key`, and report how that went."""

    key: bytes
    slot: int


class FileRead(NamedTuple):
    """Read the file of `key` into a slot, and report how that went."""

    key: bytes
    slot: int


class FileDelete(NamedTuple):
    """Delete a file by its name."""

    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """What the engine has to do before the next step, in the order of the attributes.

    A file is named by `prefix_index.key_digest` of its key.

    Attributes:
        forget_disk: whether all files that are there hold content of other weights.
        files: begin these, each after the ones before it; a slot to be written is read at once.
        stores: int32[num_stores, 2], blocks of the pool and the slots to copy them to.
        loads: int32[num_loads, 2], slots and the blocks of the pool to copy them to.
        prefetches: slots that are likely to be loaded by the next steps.
    """

    forget_disk: bool
    files: list[FileWrite | FileRead | FileDelete]
    stores: Int32
    loads: Int32
    prefetches: list[int]

    def __bool__(self) -> bool:
        files = self.forget_disk or bool(self.files)
        return files or bool(len(self.stores) or len(self.loads) or self.prefetches)


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """Blocks so far.

    Attributes:
        stored: copied from GPU to host because the GPU needed the room, or by a preemption.
        loaded: copied from host to GPU.
        host_hits: loaded for a prefix that was found in host memory.
        disk_hits: loaded for a prefix that was found on the disk.
        host_prompt_hits: the `host_hits` of sequences that were admitted for the first time.
        disk_prompt_hits: likewise the `disk_hits`.
        swapped_out: that preempted sequences kept in host memory.
        swapped_in: that they took back, from the host or, where still there, from the GPU.
        host_evictions: that left host memory.
        disk_evictions: that left the disk for want of room.
        not_stored: that found no room in host memory.
        spilled: written to files.
        failed_spills: not written, since the disk was full, slow or broken.
        read: from files.
        failed_reads: missing, damaged or late files.
    """

    stored: int = 0
    loaded: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    host_prompt_hits: int = 0
    disk_prompt_hits: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    host_evictions: int = 0
    disk_evictions: int = 0
    not_stored: int = 0
    spilled: int = 0
    failed_spills: int = 0
    read: int = 0
    failed_reads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCost:
    """What it costs to take a preempted sequence back, in seconds.

    Swapping copies its blocks to the host and back; recomputing runs its tokens through the model
    again, with attention that grows with the square of the length. The copies are taken to hide
    behind nothing. Neither is exact: copies overlap with the steps of other sequences, and a
    recomputed sequence may find part of its blocks in the prefix cache.

    Attributes:
        block_bytes: of one block over all layers.
        store_bytes_per_s: rate from GPU to host.
        load_bytes_per_s: rate from host to GPU.
        prefill_tokens_per_s: rate of a step full of prompt tokens, without their attention.
        attention_tokens: length of a sequence whose attention takes as long as all else; infinite
            if every layer has a window.
    """

    block_bytes: int
    store_bytes_per_s: float
    load_bytes_per_s: float
    prefill_tokens_per_s: float
    attention_tokens: float

    def swap_s(self, num_blocks: int) -> float:
        """Time to copy blocks to the host and back."""
        size = num_blocks * self.block_bytes
        return size / self.store_bytes_per_s + size / self.load_bytes_per_s

    def recompute_s(self, num_tokens: int) -> float:
        """Time to compute tokens again."""
        return num_tokens / self.prefill_tokens_per_s * (1 + num_tokens / self.attention_tokens)
