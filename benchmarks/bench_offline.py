"""Lists of requests to the end through the engine, all of them there at the start.

    python -m benchmarks.bench_offline --shape llama2-13b --workload short long mixed \\
        --out benchmarks/results/offline.jsonl
    python -m benchmarks.bench_offline --shape llama3.1-8b --workload long-prefill long-context
    python -m benchmarks.bench_offline --shape tiny --dtype float32 --limit 8 \\
        --max-num-seqs 4 --max-num-batched-tokens 128

Random weights of a named shape, random prompts, greedy; the end of text is ignored, so that every
output has exactly the length asked for. One engine serves the lists one after another; its start-up
is not part of the rates. One JSON line each: requests and tokens per second, steps, preemptions,
compiles after warm-up, start-up of the engine, peak device memory of the process so far, and

- `*_kv_utilisation`: share of the pool's blocks that belong to a sequence, mean and maximum.
- `*_kv_waste`: of the positions in these blocks, the share that holds no token (yet).
- `kv_saving`: what the most blocks in use are smaller than a contiguous cache with room for the
  model's maximum length, for the most sequences that ran at once.
- `matmul_share`: operations of the model and its attention per second (`benchmarks.flops`), over
  those of a large matrix product before the engine started.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from benchmarks.flops import matmul_flops_per_s, request_flops
from benchmarks.random_engine import (
    add_engine_options,
    case_name,
    exact_length,
    random_engine,
)
from benchmarks.record import record
from benchmarks.request_lists import (
    add_list_options,
    longest,
    random_prompts,
    request_lists,
    throughput,
)
from benchmarks.workloads import RequestShape
from pagedjax.engine.engine import Engine
from pagedjax.engine.stats import EngineStats
from pagedjax.heap import settled_heap

WASTE_EVERY = 8  # steps between two looks at every sequence's blocks


@dataclass(slots=True)
class Watch:
    """What the steps of a run looked like from outside.

    Attributes:
        before: the engine's figures before the first step.
        step_s: time of every `Engine.step`.
        busy: share of the KV pool in use after each.
        running: most sequences that owned blocks.
        slots: positions in the blocks of all sequences, every `WASTE_EVERY` steps.
        unused: how many of these held no token.
    """

    before: EngineStats
    step_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    running: int = 0
    slots: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)

    def look(self, engine: Engine, step_s: float) -> None:
        """Take in the state after a step that took so long."""
        scheduler = engine._scheduler  # `Engine.stats` would cost time in every step
        used = scheduler.num_used_blocks
        if used and len(self.step_s) % WASTE_EVERY == 0:
            owners = [seq for seq in scheduler.sequences() if seq.blocks]
            self.slots.append(sum(seq.capacity for seq in owners))
            self.unused.append(sum(seq.capacity - seq.num_computed for seq in owners))
        self.step_s.append(step_s)
        self.busy.append(used / (used + scheduler.num_free_blocks))
        self.running = max(self.running, scheduler.num_running)

    def mean_utilisation(self) -> float:
        """Share of the pool in use, averaged over time."""
        weighted = sum(s * b for s, b in zip(self.step_s, self.busy, strict=True))
        return weighted / sum(self.step_s)


def serve(
    engine: Engine, shapes: Sequence[RequestShape], prompts: Sequence[Sequence[int]]
) -> tuple[float, Watch]:
    """Serve all requests to the end.

    Returns:
        Seconds from the first request's arrival to the last token, and what was seen on the way.

    Raises:
        RuntimeError: an output has another length than asked for.
    """
    start = time.perf_counter()
    for index, (shape, prompt) in enumerate(zip(shapes, prompts, strict=True)):
        params = exact_length(shape.output_len)
        engine.add_request(str(index), None, prompt, params, stream=False)
    generated = [0] * len(shapes)
    watch, before = Watch(engine.stats()), time.perf_counter()
    with settled_heap():
        while engine.has_unfinished():
            for delta in engine.step():
                generated[int(delta.request_id)] = delta.num_generated_tokens
            now = time.perf_counter()
            watch.look(engine, now - before)
            before = now
    seconds = before - start
    for index, (got, shape) in enumerate(zip(generated, shapes, strict=True)):
        if got != shape.output_len:
            raise RuntimeError(f"request {index}: got {got} tokens, wanted {shape.output_len}")
    return seconds, watch


def figures(engine: Engine, watch: Watch) -> dict[str, Any]:
    """What the engine says about the run."""
    stats, config = engine.stats(), engine.config
    memory = jax.devices()[0].memory_stats() or {}
    spec = engine.kv_spec
    peak_bytes = round(max(watch.busy) * stats.blocks_total) * spec.block_bytes
    reserved = watch.running * engine.arch.max_positions * (spec.block_bytes // spec.block_size)
    waste = np.array(watch.unused) / np.array(watch.slots)
    return {
        "steps": stats.steps - watch.before.steps,
        "preemptions": stats.preemptions - watch.before.preemptions,
        "compiles_after_warmup": stats.compiles_after_warmup,
        "peak_running": watch.running,
        "peak_kv_utilisation": round(max(watch.busy), 4),
        "mean_kv_utilisation": round(watch.mean_utilisation(), 4),
        "mean_kv_waste": round(sum(watch.unused) / sum(watch.slots), 4),
        "peak_kv_waste": round(float(waste.max()), 4),
        "kv_pool_bytes": stats.blocks_total * spec.block_bytes,
        "peak_kv_bytes": peak_bytes,
        "contiguous_kv_bytes": reserved,
        "kv_saving": round(1 - peak_bytes / reserved, 4),
        "peak_device_bytes": memory.get("peak_bytes_in_use"),
        "max_model_len": engine.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_list_options(parser)
    add_engine_options(parser)
    parser.add_argument("--matmul-size", type=int, help="default 8192, CPU 512")
    return parser


def main() -> None:
    args = options().parse_args()
    lists = request_lists(args.workload, args.requests, args.limit)
    on_cpu = jax.default_backend() == "cpu"
    matmul_rate = matmul_flops_per_s(args.matmul_size or (512 if on_cpu else 8192), args.dtype)
    engine, started = random_engine(args, max(map(longest, lists.values())))
    for name, shapes in lists.items():
        seconds, watch = serve(engine, shapes, random_prompts(shapes, engine.arch.vocab))
        rate = request_flops(engine.arch, shapes) / seconds
        record(
            "offline", case_name(args, name), args.out,
            **throughput(shapes, seconds), **figures(engine, watch), **started,
            model_tflop_per_s=round(rate / 1e12, 4),
            matmul_tflop_per_s=round(matmul_rate / 1e12, 4),
            matmul_share=round(rate / matmul_rate, 4),
            prefix_caching=args.prefix_caching, contiguous_blocks=args.contiguous_blocks,
            weights="random",
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )  # fmt: skip


if __name__ == "__main__":
    main()
