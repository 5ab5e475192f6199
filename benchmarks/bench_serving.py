"""Latency under load: requests that arrive over time, through `AsyncLLM`.

    python -m benchmarks.bench_serving --trace AzureLLMInferenceTrace_conv.csv --limit 512 \\
        --load 0.5 0.8 --ttft-ms 200 --itl-ms 40 --out benchmarks/results/serving.jsonl
    python -m benchmarks.bench_serving --trace mooncake_conversation_trace.jsonl --limit 200 \\
        --longest 32768 --prefix-caching --load 0.8
    python -m benchmarks.bench_serving --shape llama3.1-8b --workload sharegpt --rates 10 20 30
    python -m benchmarks.bench_serving --shape tiny --dtype float32 --limit 12 --rates 20 \\
        --max-num-seqs 4 --max-num-batched-tokens 128

A trace (Azure's CSV, Mooncake's JSON lines) brings its own arrivals, bursts and all; its clock runs
faster or slower so that the mean rate is the one asked for. Lists of lengths arrive as a Poisson
process. `--rates` are requests per second; `--load` are fractions of saturation, which is measured
first: the rate at which the same requests are served when all of them wait from the start. One
engine with random weights serves everything; outputs have exactly the length asked for.

One JSON line per rate, times in milliseconds as percentiles and mean:

- `ttft`: from the time at which a request was to arrive until its first token is in the caller's
  hands. How late the caller itself was to send it is in there, and alone in `late`.
- `itl`: between two deliveries to a request, over all requests. A request's `tpot`: from first
  token to last, per token after the first. `e2e`: from arrival to last token.
- `goodput_per_s`: requests with a first token within `--ttft-ms` and a 99th percentile of their
  own intervals within `--itl-ms`.

A rate that takes longer than `--max-seconds` is broken off; what had not finished does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_offline import serve
from benchmarks.random_engine import add_engine_options, case_name, exact_length, random_engine
from benchmarks.record import record
from benchmarks.request_lists import add_list_options, longest, random_prompts, request_lists
from benchmarks.workloads import RequestShape, trace
from pagedjax import AsyncLLM
from pagedjax.heap import settled_heap

PERCENTILES = (50, 90, 99)
LEAD_S = 0.2  # between the start of the clock and the first arrival
Prompts = Sequence[Sequence[int]]


@dataclass(slots=True)
class Served:
    """What a caller saw of one request, in seconds of one clock.

    Attributes:
        due: when it was to arrive.
        sent: when it was handed over.
        seen: when each delivery of tokens came.
        tokens: how many came.
        finished: whether it got its last one.
    """

    due: float
    sent: float = 0.0
    seen: list[float] = field(default_factory=list)
    tokens: int = 0
    finished: bool = False

    @property
    def ttft(self) -> float:
        """From arrival to the first token."""
        return self.seen[0] - self.due

    @property
    def e2e(self) -> float:
        """From arrival to the last token."""
        return self.seen[-1] - self.due

    @property
    def intervals(self) -> np.ndarray:
        """Between two deliveries."""
        return np.diff(self.seen)


def poisson(shapes: Sequence[RequestShape], rate: float, seed: int = 0) -> list[RequestShape]:
    """The same requests, arriving independently of each other, `rate` per second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(shapes))
    gaps[0] = 0.0
    return [
        dataclasses.replace(shape, arrival_s=float(at))
        for shape, at in zip(shapes, np.cumsum(gaps), strict=True)
    ]


def at_rate(shapes: Sequence[RequestShape], rate: float) -> list[RequestShape]:
    """A trace with its clock set so that `rate` requests arrive per second on average.

    Raises:
        ValueError: all requests arrive at once.
    """
    first = shapes[0].arrival_s
    length = shapes[-1].arrival_s - first
    if length <= 0:
        raise ValueError("all requests of the trace arrive at once, so it has no rate")
    factor = (len(shapes) - 1) / rate / length
    return [dataclasses.replace(s, arrival_s=(s.arrival_s - first) * factor) for s in shapes]


async def replay(
    llm: AsyncLLM, shapes: Sequence[RequestShape], prompts: Prompts, max_seconds: float
) -> list[Served]:
    """Send every request when it is due; what has not finished in time is aborted."""
    gc.collect()
    with settled_heap():  # no pause to look through what was made up to here
        loop = asyncio.get_running_loop()
        start = time.perf_counter() + LEAD_S
        served, tasks = [], []
        for shape, prompt in zip(shapes, prompts, strict=True):
            if shape.arrival_s > max_seconds:
                break
            one = Served(due=start + shape.arrival_s)
            served.append(one)
            await asyncio.sleep(max(0.0, one.due - time.perf_counter()))
            tasks.append(loop.create_task(_follow(llm, prompt, shape.output_len, one)))
        left = max(0.0, start + max_seconds - time.perf_counter())
        finished, unfinished = await asyncio.wait(tasks, timeout=left)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
    for task in finished:
        task.result()  # raises what the request raised
    return served


async def _follow(llm: AsyncLLM, prompt: Sequence[int], output_len: int, one: Served) -> None:
    clock, seen = time.perf_counter, one.seen
    one.sent = clock()
    async for delta in llm.generate(prompt, exact_length(output_len)):
        seen.append(clock())
        one.tokens += delta.num_generated_tokens
    one.finished = one.tokens == output_len
    if not one.finished:
        raise RuntimeError(f"a request got {one.tokens} tokens, wanted {output_len}")


def spread(name: str, seconds: np.ndarray) -> dict[str, float]:
    """Percentiles and mean in milliseconds."""
    figures = {f"{name}_p{p}_ms": float(np.percentile(seconds, p)) for p in PERCENTILES}
    figures[f"{name}_mean_ms"] = float(seconds.mean())
    return {key: round(value * 1e3, 3) for key, value in figures.items()}


def latencies(served: Sequence[Served], ttft_ms: float, itl_ms: float) -> dict[str, Any]:
    """Figures of the requests that finished.

    Args:
        served: all that were sent.
        ttft_ms: bound on the first token.
        itl_ms: bound on a request's own 99th percentile of intervals.

    Raises:
        ValueError: none finished.
    """
    done = [one for one in served if one.finished]
    if not done:
        raise ValueError(f"none of {len(served)} requests finished; --max-seconds is too short")
    seconds = max(one.seen[-1] for one in done) - served[0].due
    intervals = [one.intervals for one in done]
    long = [one for one in done if one.tokens > 1]
    good = sum(
        one.ttft * 1e3 <= ttft_ms and (not gaps.size or np.percentile(gaps, 99) * 1e3 <= itl_ms)
        for one, gaps in zip(done, intervals, strict=True)
    )
    figures: dict[str, Any] = {
        "requests": len(served), "finished": len(done), "seconds": round(seconds, 3),
        "finished_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(sum(one.tokens for one in done) / seconds, 1),
        "goodput_per_s": round(good / seconds, 3), "good_share": round(good / len(served), 4),
        "ttft_bound_ms": ttft_ms, "itl_bound_ms": itl_ms, "peak_concurrency": concurrency(done),
        **spread("ttft", np.array([one.ttft for one in done])),
        **spread("e2e", np.array([one.e2e for one in done])),
        **spread("late", np.array([one.sent - one.due for one in done])),
    }  # fmt: skip
    if long:
        figures |= spread("itl", np.concatenate(intervals))
        per_token = [(one.seen[-1] - one.seen[0]) / (one.tokens - 1) for one in long]
        figures |= spread("tpot", np.array(per_token))
    return figures


def concurrency(served: Sequence[Served]) -> int:
    """Most requests that were open at once."""
    steps = [(one.due, 1) for one in served] + [(one.seen[-1], -1) for one in served]
    return int(np.cumsum([step for _, step in sorted(steps)]).max())


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_list_options(parser)
    parser.add_argument("--trace", type=Path, help="arrivals and lengths of a .csv or .jsonl trace")
    parser.add_argument("--longest", type=int, help="leave out requests of more tokens than this")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--rates", type=float, nargs="+", help="requests per second")
    which.add_argument("--load", type=float, nargs="+", help="fractions of saturation")
    parser.add_argument("--saturation", type=float, help="requests per second, if known already")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="per rate")
    parser.add_argument("--ttft-ms", type=float, default=200.0, help="bound for goodput")
    parser.add_argument("--itl-ms", type=float, default=40.0, help="bound for goodput")
    add_engine_options(parser)
    return parser


def requests(args: argparse.Namespace) -> tuple[str, list[RequestShape]]:
    """Name and requests of the one load asked for.

    Raises:
        ValueError: the options name several, or nothing is left of it.
    """
    if args.trace is not None:
        name, shapes = args.trace.stem, trace(args.trace)
    else:
        lists = request_lists(args.workload, args.requests, None)
        if len(lists) != 1:
            raise ValueError(f"want one list of requests, got {sorted(lists)}")
        [(name, shapes)] = lists.items()
    if args.longest is not None:
        shapes = [s for s in shapes if s.prompt_len + s.output_len <= args.longest]
    shapes = shapes[: args.limit]
    if len(shapes) < 2:
        raise ValueError(f"want at least 2 requests, got {len(shapes)}")
    return name, shapes


def main() -> None:
    args = options().parse_args()
    name, shapes = requests(args)
    engine, started = random_engine(args, longest(shapes))
    vocab = engine.arch.vocab
    rates, saturation = args.rates, args.saturation
    if rates is None:
        if saturation is None:
            seconds, _ = serve(engine, shapes, random_prompts(shapes, vocab))
            saturation = len(shapes) / seconds
        rates = [fraction * saturation for fraction in args.load]

    async def measure() -> None:
        async with AsyncLLM.from_engine(engine) as llm:
            for index, rate in enumerate(rates):
                timed = at_rate(shapes, rate) if args.trace else poisson(shapes, rate)
                # other prompts for every rate, so that no prefix is left from the one before
                prompts = random_prompts(timed, vocab, seed=index + 1)
                before = await llm.stats()
                served = await replay(llm, timed, prompts, args.max_seconds)
                after = await llm.stats()
                record(
                    "serving", case_name(args, name), args.out,
                    rate_per_s=round(rate, 3),
                    load=round(rate / saturation, 4) if saturation else None,
                    saturation_per_s=round(saturation, 3) if saturation else None,
                    arrivals="trace" if args.trace else "poisson",
                    **latencies(served, args.ttft_ms, args.itl_ms),
                    preemptions=after.preemptions - before.preemptions,
                    compiles_after_warmup=after.compiles_after_warmup,
                    max_num_seqs=engine.config.max_num_seqs,
                    max_num_batched_tokens=engine.config.max_num_batched_tokens,
                    ttft_target_s=engine.config.ttft_target_s,
                    prefix_caching=args.prefix_caching, **started, weights="random",
                )  # fmt: skip

    asyncio.run(measure())


if __name__ == "__main__":
    main()
