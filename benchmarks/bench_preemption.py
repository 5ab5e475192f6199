"""Preemption by swap beside recompute: where they cross, and a burst in a pool too small for it.

    python -m benchmarks.bench_preemption --shape llama3.1-8b --lengths 512 2048 8192 16384 \\
        --requests 48 --prompt-len 896 --output-len 512 --max-num-seqs 32 --repeats 1 \\
        --out benchmarks/results/preemption_h200.jsonl
    python -m benchmarks.bench_preemption --shape smollm2-135m --dtype float32 \\
        --lengths 64 128 256 512 --requests 10 --prompt-len 200 --output-len 150 \\
        --max-num-seqs 8 --max-num-batched-tokens 256 --host-gb 1

One JSON line per length: the measured time to copy a sequence's blocks to the host and back, and
to compute its tokens again, beside what `SwapCost` says of both. One line per policy for the
burst, in a pool of a quarter of what all requests need together: tokens per second, preemptions,
swaps; the policies run by turns. All of it on one engine, so that the pool must hold the longest
length. Prefix caching is off, so that recomputing does what its name says; weights are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.bench_offline import serve
from benchmarks.random_engine import add_engine_options, case_name, engine_config, warm
from benchmarks.record import record
from benchmarks.request_lists import random_prompts, throughput
from benchmarks.shapes import SHAPES, random_model
from benchmarks.workloads import RequestShape
from pagedjax.engine.engine import Engine
from pagedjax.engine.kv_pool import KVPool, kv_spec
from pagedjax.loading import LoadedModel

POLICIES = ("recompute", "swap", "auto")


def swap_s(engine: Engine, num_blocks: int) -> float:
    """Seconds to copy so many blocks to the host, and then back; the best of three."""
    assert engine._lower is not None
    mover, runner = engine._lower.mover, engine._runner
    blocks = np.arange(1, num_blocks + 1, dtype=np.int32)
    stores = np.stack([blocks, blocks - 1], axis=1)

    def there_and_back(pool: KVPool) -> KVPool:
        mover.store(pool, stores)
        jax.block_until_ready([mover.content(slot) for slot in range(num_blocks)])
        return jax.block_until_ready(mover.load(pool, stores[:, ::-1].copy()))

    times = []
    for _ in range(3):
        start = time.perf_counter()
        runner.update_pool(there_and_back)
        times.append(time.perf_counter() - start)
    return min(times)


def recompute_s(engine: Engine, num_tokens: int) -> float:
    """Seconds to compute a prompt of so many tokens; the best of two."""
    shape = [RequestShape(num_tokens, 1, 0.0)]
    prompts = random_prompts(shape, engine.arch.vocab)
    return min(serve(engine, shape, prompts)[0] for _ in range(2))


def prepared(model: LoadedModel, args: argparse.Namespace) -> Engine:
    """The engine that everything is measured on: its pool is a quarter of what the burst needs.

    Raises:
        ValueError: the pool does not hold the longest of `--lengths`, or the host memory does not.
    """
    longest = max(max(args.lengths) + 1, args.prompt_len + args.output_len)
    needed = args.requests * -(-(args.prompt_len + args.output_len) // args.block_size)
    config = dataclasses.replace(
        engine_config(args, longest),
        num_blocks=1 + needed // 4,
        prefix_caching=False,
        host_cache_bytes=int(args.host_gb * 1e9),
    )
    room = min(needed // 4, config.host_cache_bytes // bytes_of_a_block(model, args))
    if max(args.lengths) >= room * args.block_size:
        raise ValueError(
            f"want lengths below {room * args.block_size} tokens, which is what a quarter of the "
            f"burst's blocks and {args.host_gb} GB of host memory hold; got {max(args.lengths)}"
        )
    engine = Engine(model, None, config)
    warm(engine)
    return engine


def crossover(engine: Engine, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Figures of each length."""
    cost = engine._scheduler.swap_cost
    assert cost is not None
    rows = []
    for length in sorted(lengths):
        num_blocks = -(-length // engine.config.block_size)
        measured = {"swap": swap_s(engine, num_blocks), "recompute": recompute_s(engine, length)}
        model_says = {"swap": cost.swap_s(num_blocks), "recompute": cost.recompute_s(length)}
        rows.append(
            {
                "tokens": length,
                "blocks": num_blocks,
                "bytes": num_blocks * engine.kv_spec.block_bytes,
                "swap_ms": round(measured["swap"] * 1e3, 3),
                "recompute_ms": round(measured["recompute"] * 1e3, 3),
                "modelled_swap_ms": round(model_says["swap"] * 1e3, 3),
                "modelled_recompute_ms": round(model_says["recompute"] * 1e3, 3),
                "faster": min(measured, key=measured.__getitem__),
                "chosen": min(model_says, key=model_says.__getitem__),
                "store_gb_per_s": round(cost.store_bytes_per_s / 1e9, 3),
                "load_gb_per_s": round(cost.load_bytes_per_s / 1e9, 3),
                "prefill_tokens_per_s": round(cost.prefill_tokens_per_s, 1),
            }
        )
    return rows


def bursts(engine: Engine, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of the burst under each policy: of the fastest of a few runs by turns."""
    shapes = [RequestShape(args.prompt_len, args.output_len, 0.0)] * args.requests
    prompts = random_prompts(shapes, engine.arch.vocab)
    scheduler = engine._scheduler
    best: dict[str, dict[str, Any]] = {}
    for _ in range(args.repeats):
        for policy in POLICIES:
            # Read whenever a sequence loses its blocks, and nothing runs now.
            scheduler.config = dataclasses.replace(scheduler.config, preemption=policy)
            before = engine.stats()
            seconds, _ = serve(engine, shapes, prompts)
            after = engine.stats()
            if policy not in best or seconds < best[policy]["seconds"]:
                best[policy] = {
                    **throughput(shapes, seconds),
                    "preemption": policy,
                    "preemptions": after.preemptions - before.preemptions,
                    "swaps": after.swaps - before.swaps,
                    "num_blocks": engine.config.num_blocks,
                    "compiles_after_warmup": after.compiles_after_warmup,
                    "repeats": args.repeats,
                }
    return best


def bytes_of_a_block(model: LoadedModel, args: argparse.Namespace) -> int:
    """Of the engine's KV pool."""
    dtype = model.params["embed.table"].dtype
    return kv_spec(model.arch, engine_config(args, 2), num_blocks=1, dtype=dtype).block_bytes


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_engine_options(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-len", type=int, default=896)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--host-gb", type=float, default=8.0, help="host memory for the swaps")
    parser.add_argument("--repeats", type=int, default=2, help="of the burst; the fastest counts")
    return parser


def main() -> None:
    args = options().parse_args()
    model = random_model(SHAPES[args.shape], args.dtype)
    engine = prepared(model, args)
    rows = crossover(engine, args.lengths)
    for row in rows:
        record("preemption", case_name(args, f"length {row['tokens']}"), args.out, **row)
    load = f"burst of {args.requests} x {args.prompt_len}+{args.output_len}"
    best = bursts(engine, args)
    for policy, figures in best.items():
        speedup = best["recompute"]["seconds"] / figures["seconds"]
        record(
            "preemption", case_name(args, f"{load} {policy}"), args.out, **figures,
            speedup_over_recompute=round(speedup, 4),
        )  # fmt: skip


if __name__ == "__main__":
    main()
