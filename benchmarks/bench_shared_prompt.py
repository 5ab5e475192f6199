"""Time to the first token under one long system prompt, with prefix caching and without.

    python -m benchmarks.bench_shared_prompt --shape llama3.1-8b \\
        --out benchmarks/results/shared_prompt.jsonl
    python -m benchmarks.bench_shared_prompt --shape llama3.1-8b --rate 8
    python -m benchmarks.bench_shared_prompt --shape tiny --dtype float32 --count 8 --shared 512 \\
        --max-num-seqs 4 --max-num-batched-tokens 128

The same requests go through `AsyncLLM` three times: `without`, on an engine without prefix caching;
`cold`, on one with it that has not seen the system prompt yet; `warm`, the same engine again, with
other questions under the same prompt. They arrive all at once, or as a Poisson process of `--rate`
requests per second. One JSON line each, with the figures of `bench_serving`; the lines with the
cache also tell how many times as late first tokens are without it (`ttft_p50_speedup` and others)
and which share of the prompts' tokens was found. Weights are random, outputs have exactly the
length asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

from benchmarks.bench_serving import latencies, poisson, replay
from benchmarks.random_engine import add_engine_options, case_name, engine_config, warm
from benchmarks.record import record
from benchmarks.request_lists import longest, random_prompts
from benchmarks.shapes import SHAPES, random_model
from benchmarks.workloads import RequestShape, shared_prompt
from pagedjax import AsyncLLM
from pagedjax.engine.engine import Engine
from pagedjax.loading import LoadedModel

SPEEDUPS = ("p50", "p90", "p99", "mean")
Run = tuple[Sequence[RequestShape], Sequence[Sequence[int]]]


async def serve_in_turn(engine: Engine, runs: Sequence[Run], args: argparse.Namespace) -> list[Any]:
    """Figures of some loads, one after another on one engine.

    Raises:
        RuntimeError: a request did not finish within `--max-seconds`.
    """
    figures = []
    async with AsyncLLM.from_engine(engine) as llm:
        for shapes, prompts in runs:
            before = await llm.stats()
            served = await replay(llm, shapes, prompts, args.max_seconds)
            after = await llm.stats()
            if not all(one.finished for one in served) or len(served) < len(shapes):
                done = sum(one.finished for one in served)
                raise RuntimeError(
                    f"{done} of {len(shapes)} requests finished within {args.max_seconds} s; want "
                    "all of them, so that the same ones are compared"
                )
            hit, looked_up = (
                getattr(after, name) - getattr(before, name)
                for name in ("prefix_hit_tokens", "prefix_lookup_tokens")
            )
            figures.append(
                {
                    **latencies(served, args.ttft_ms, args.itl_ms),
                    "hit_share": round(hit / looked_up, 4) if looked_up else 0.0,
                    "preemptions": after.preemptions - before.preemptions,
                    "compiles_after_warmup": after.compiles_after_warmup,
                    "blocks_peak": after.blocks_peak,
                }
            )
    return figures


def measure(model: LoadedModel, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of the load without a prefix cache, with an empty and with a filled one."""
    # Twice as many as a run needs: the second half asks other questions under the same prompt.
    both = shared_prompt(
        2 * args.count, shared=args.shared, own=args.own, output_len=args.output_len
    )
    prompts = random_prompts(both, model.arch.vocab)
    timed = both[: args.count]
    if args.rate is not None:
        timed = poisson(timed, args.rate)
    first, second = (timed, prompts[: args.count]), (timed, prompts[args.count :])
    found: dict[str, dict[str, Any]] = {}
    for caching, runs in ((False, {"without": first}), (True, {"cold": first, "warm": second})):
        config = dataclasses.replace(engine_config(args, longest(both)), prefix_caching=caching)
        engine = Engine(model, None, config)
        warm(engine)
        figures = asyncio.run(serve_in_turn(engine, list(runs.values()), args))
        found |= dict(zip(runs, figures, strict=True))
        del engine
        gc.collect()  # its pool, before the next engine takes as much
    for name in ("cold", "warm"):
        for part in SPEEDUPS:
            slow, fast = (found[run][f"ttft_{part}_ms"] for run in ("without", name))
            found[name][f"ttft_{part}_speedup"] = round(slow / fast, 3)
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=256, help="requests")
    parser.add_argument("--shared", type=int, default=2048, help="tokens of the system prompt")
    parser.add_argument("--own", type=int, default=64, help="tokens of a request's own")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rate", type=float, help="requests per second; default: all at once")
    parser.add_argument("--max-seconds", type=float, default=120.0, help="for one run")
    parser.add_argument("--ttft-ms", type=float, default=200.0, help="bound for goodput")
    parser.add_argument("--itl-ms", type=float, default=40.0, help="bound for goodput")
    add_engine_options(parser)
    return parser


def main() -> None:
    args = options().parse_args()
    model = random_model(SHAPES[args.shape], args.dtype)
    load = f"{args.count} x ({args.shared}+{args.own})+{args.output_len}"
    if args.rate is not None:
        load += f" at {args.rate:g}/s"
    for name, figures in measure(model, args).items():
        record(
            "shared_prompt", case_name(args, f"{load} {name}"), args.out, run=name,
            rate_per_s=args.rate, arrivals="at once" if args.rate is None else "poisson",
            **figures, weights="random",
        )  # fmt: skip


if __name__ == "__main__":
    main()
