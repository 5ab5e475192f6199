"""Lists of requests to the end through the engine, all of them there at the start.

    python -m benchmarks.bench_offline --shape llama2-13b --out benchmarks/results/offline.jsonl \\
        --requests short.json long.json mixed.json
    python -m benchmarks.bench_offline --shape tiny --dtype float32 --limit 8 \\
        --max-num-seqs 4 --max-num-batched-tokens 128

Random weights of a named shape, random prompts, greedy; the end of text is ignored, so that every
output has exactly the length asked for. Each of `--requests` is a JSON list of {prompt_len,
output_len}; one engine serves them one after another. One JSON line each: requests and tokens per
second, steps, preemptions, use of the KV pool, compiles after warm-up, start-up of the engine, peak
device memory of the process so far. Start-up is not part of the rates.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks.random_engine import add_engine_options, exact_length, random_engine
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


@dataclass(slots=True)
class Watch:
    """What the steps of a run looked like from outside.

    Attributes:
        before: the engine's figures before the first step.
        step_s: time of every `Engine.step`.
        busy: share of the KV pool in use after each.
        running: most sequences that owned blocks.
    """

    before: EngineStats
    step_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    running: int = 0

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
        engine.add_request(str(index), None, prompt, exact_length(shape.output_len))
    generated = [0] * len(shapes)
    watch, before = Watch(engine.stats()), time.perf_counter()
    while engine.has_unfinished():
        for delta in engine.step():
            generated[int(delta.request_id)] += len(delta.outputs[0].token_ids)
        now, stats = time.perf_counter(), engine.stats()
        watch.step_s.append(now - before)
        watch.busy.append(stats.block_utilisation)
        watch.running = max(watch.running, stats.num_running)
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
    itemsize = jax.numpy.dtype(config.dtype).itemsize
    block_bytes = engine.arch.kv_elements_per_token * config.block_size * itemsize
    return {
        "steps": stats.steps - watch.before.steps,
        "preemptions": stats.preemptions - watch.before.preemptions,
        "compiles_after_warmup": stats.compiles_after_warmup,
        "peak_running": watch.running,
        "peak_kv_utilisation": round(max(watch.busy), 4),
        "mean_kv_utilisation": round(watch.mean_utilisation(), 4),
        "kv_pool_bytes": stats.blocks_total * block_bytes,
        "peak_kv_bytes": round(max(watch.busy) * stats.blocks_total) * block_bytes,
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
    return parser


def main() -> None:
    args = options().parse_args()
    lists = request_lists(args.requests, args.limit)
    engine, started = random_engine(args, max(map(longest, lists.values())))
    for name, shapes in lists.items():
        seconds, watch = serve(engine, shapes, random_prompts(shapes, engine.arch.vocab))
        record(
            "offline", f"{args.shape} {args.dtype} {name}", args.out,
            **throughput(shapes, seconds), **figures(engine, watch), **started,
            prefix_caching=args.prefix_caching, weights="random",
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )  # fmt: skip


if __name__ == "__main__":
    main()
