"""How an engine is set up: one frozen record, checked when it is made."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from pagedjax.field_types import check_field_types
from scheduler.config import BLOCK_SIZES, PREEMPTION

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "fp8", "int8", "fp8-values", "int8-values")
IMPLEMENTATIONS = ("mosaic", "triton", "xla", "reference")

# Tokens and rows of a step are counted in int32 on the device.
_MOST: dict[str, int] = {"max_num_seqs": 2**31 - 1, "max_num_batched_tokens": 2**31 - 1}


def cache_home() -> Path:
    """The user's cache directory for this project."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "pagedjax"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `LLM`, `AsyncLLM` and `Engine`.

    Attributes:
        dtype: of weights and activations. "auto" is the checkpoint's own on a GPU and
            float32 on a CPU, where bfloat16 arithmetic is emulated and slow.
        kv_cache_dtype: of the KV cache. "auto" is the dtype of the weights; "fp8" (e4m3) and "int8"
            hold the keys and values in one byte each, with scales per layer and head
            (`pagedjax.engine.kv_scales`). "fp8-values" and "int8-values" do so with the values
            alone: keys stay as they are, which costs less accuracy and saves half as much.
        block_size: tokens per KV block: 16, 32, 64 or 128. Larger blocks mean shorter tables and
            more waste in each sequence's last block.
        num_blocks: blocks of the KV pool, the null block included. None sizes the pool by
            `memory_fraction`.
        memory_fraction: share of the GPU memory that JAX may use (by default three quarters of
            it, see XLA_PYTHON_CLIENT_MEM_FRACTION) for weights, KV pool and a step's activations;
            of the memory of the machine or its container, on a CPU, for the KV pool alone. None is
            0.9 on a GPU and 0.1 on a CPU.
        max_model_len: longest sequence in tokens, prompt and output together. None is what the
            checkpoint states; the pool's capacity limits it further.
        max_num_seqs: sequences in one step, and rows sampled in it. None: 256 on a GPU, 32 on a
            CPU.
        max_num_batched_tokens: tokens computed in one step, over all sequences. Fewer spread a
            prompt over more steps, which read the weights for it and for all decodes at once: that
            can serve more requests per second where answers are long, with shorter intervals
            between tokens. More bring the first tokens of many prompts sooner. None: 2048 on a
            GPU, 512 on a CPU.
        max_prefill_chunk: most tokens of one sequence in one step; None: only the step's budget
            limits it.
        ttft_target_s: seconds in which a request is to have its first token. When a burst of
            prompts makes that impossible for some, the longest of them wait, so that as many as
            possible are in time, instead of all being served in order of arrival; nobody waits so
            for more than a few times the target. Blocks and places, where they are scarce, are
            still given out in order of arrival. Steps are also planned as late as the device
            allows (`pagedjax.engine.pace`). Callers see a token some milliseconds after the engine
            has it, for which a target a little below their bound leaves room. None: nobody waits
            for a first token, as when whole batches are generated.
        bucket_growth: ratio of neighbouring step sizes that are compiled. None: 2 on a GPU,
            where decode steps of 128 sequences and more have sizes in between as well; 4 on a CPU,
            where a compile costs more than its padding.
        prefix_caching: whether finished blocks are kept and found again by later prompts that
            begin with the same tokens.
        contiguous_blocks: whether a request gets neighbouring blocks of the pool where there are
            any (`scheduler.free_lists` tells what it costs), or whichever are free.
        host_cache_bytes: memory of the host, pinned, for cached blocks that the KV pool has no room
            for, and for the blocks of preempted requests; 0 for none.
        disk_cache_path: a directory of this engine's own, for cached blocks that `host_cache_bytes`
            has no room for; they are found again after a restart with the same weights. None for
            no disk.
        disk_cache_bytes: how much of the disk; needed with `disk_cache_path`.
        preemption: how a request that has lost its blocks comes back: "recompute" its tokens,
            "swap" its blocks to the host and back while there is room for them, or "auto" for
            whichever is faster by the rates that follow.
        link_bytes_per_s: rate of copies between device and host, for "auto". None measures it at
            start.
        prefill_tokens_per_s: rate at which prompts are computed but for their attention, likewise.
        max_logprobs: most alternatives per token that a request may ask for.
        seed: where the seeds of requests that bring none are drawn from.
        implementation: backend of the paged operations, "mosaic", "triton", "xla" or "reference";
            None picks one for the device.
        cuda_graphs: whether a step on an NVIDIA GPU is launched as a whole, as a CUDA graph, or
            kernel by kernel. Profilers tell more of the latter.
        warm_up: compile every step at start, so that none is compiled later. Without it each
            step is compiled when first needed, and counted.
        compilation_cache: keep compiled steps in the user's cache directory, unless JAX already
            has a persistent compilation cache configured.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_prefill_chunk: int | None = None
    ttft_target_s: float | None = None
    bucket_growth: int | None = None
    prefix_caching: bool = True
    contiguous_blocks: bool = False
    host_cache_bytes: int = 0
    disk_cache_path: str | Path | None = None
    disk_cache_bytes: int = 0
    preemption: str = "auto"
    link_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    max_logprobs: int = 20
    seed: int = 0
    implementation: str | None = None
    cuda_graphs: bool = True
    warm_up: bool = True
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        check_field_types(self)
        choices = {
            "dtype": DTYPES,
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "block_size": BLOCK_SIZES,
            "preemption": PREEMPTION,
            "implementation": (None, *IMPLEMENTATIONS),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        least = {
            "num_blocks": 2,  # the null block and one that holds data
            "max_model_len": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_prefill_chunk": 1,
            "bucket_growth": 2,
            "max_logprobs": 0,
            "host_cache_bytes": 0,
            "disk_cache_bytes": 0,
            "seed": 0,
        }
        for name, floor in least.items():
            value = getattr(self, name)
            if value is None:
                continue
            if value > _MOST.get(name, value):
                raise ValueError(f"{name} must be at most {_MOST[name]}, got {value!r}")
            if value < floor:
                raise ValueError(f"{name} must be an integer, at least {floor}; got {value!r}")
            object.__setattr__(self, name, int(value))  # products of numpy's could overflow
        if (self.disk_cache_path is None) == (self.disk_cache_bytes > 0):
            raise ValueError(
                f"disk_cache_path and disk_cache_bytes go together, got {self.disk_cache_path} and "
                f"{self.disk_cache_bytes}"
            )
        if self.disk_cache_path is not None and not self.host_cache_bytes:
            raise ValueError("a disk cache is filled from host memory: host_cache_bytes is 0")
        if self.preemption == "swap" and not self.host_cache_bytes:
            raise ValueError("preemption is 'swap', which needs host memory: host_cache_bytes is 0")
        for name in ("link_bytes_per_s", "prefill_tokens_per_s", "ttft_target_s"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ValueError(f"{name} must be positive, got {rate}")

    def resolved(self, *, platform: str, max_positions: int) -> EngineConfig:
        """Every choice left open made, for a device platform and a checkpoint's context length.

        Raises:
            ValueError: `max_model_len` exceeds the checkpoint's context length, or the options
                contradict each other.
        """
        length = self.max_model_len or max_positions
        if length > max_positions:
            raise ValueError(f"max_model_len is {length}, the model states {max_positions}")
        on_cpu = platform == "cpu"
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        # Whichever of the two is left open makes room for the one that is given.
        tokens = tokens or max(512 if on_cpu else 2048, seqs or 0)
        seqs = seqs or min(32 if on_cpu else 256, tokens)
        if tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {tokens}, below max_num_seqs {seqs}: "
                "a step could not hold one token of every sequence"
            )
        return dataclasses.replace(
            self,
            memory_fraction=self.memory_fraction or (0.1 if on_cpu else 0.9),
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            bucket_growth=self.bucket_growth or (4 if on_cpu else 2),
        )
