"""How long the host takes to plan: `python -m benchmarks.bench_scheduler [--trace PATH]`.

Two questions, both without a model, the loop one plan ahead as the engine runs it:

- `decode_N`: microseconds per scheduled sequence, `schedule` and `update` together, while N
  sequences decode.
- `trace`: the same over a simulation of many requests with the lengths of a trace, as fast as
  the budgets let them through, prompts without a common prefix.

Times are CPU times of this process, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.record import record
from benchmarks.workloads import RequestShape, azure_trace, synthetic
from scheduler import Request, Scheduler, SchedulerConfig, StepPlan, StopRules

RUNNING = (1, 64, 256)
TARGET_US = 5.0  # per scheduled sequence at 256 running


@dataclass
class Clock:
    """Runs the loop with a device that takes no time, and times the scheduler in it."""

    scheduler: Scheduler
    step_us: list[float] = field(default_factory=list)
    step_seqs: list[int] = field(default_factory=list)
    num_tokens: int = 0
    _unread: StepPlan | None = None

    def step(self) -> StepPlan | None:
        """One turn: plan a step, and take in the tokens of the one before it."""
        tokens = None if self._unread is None else np.zeros(self._unread.num_samples, np.int32)
        start_ns = time.process_time_ns()
        plan = self.scheduler.schedule()
        if self._unread is not None and tokens is not None:
            self.scheduler.update(self._unread, tokens)
        elapsed_ns = time.process_time_ns() - start_ns
        self._unread = plan
        if plan is not None:
            self.step_us.append(elapsed_ns / 1e3)
            self.step_seqs.append(len(plan.seqs))
            self.num_tokens += plan.num_tokens
        return plan


def bench_decode(running: int, steps: int, prefix_caching: bool) -> dict[str, float]:
    """Plan `steps` steps in which `running` sequences decode."""
    blocks_per_seq = (100 + 2 * steps) // 16 + 1
    config = SchedulerConfig(
        num_blocks=2 * running * blocks_per_seq,
        max_model_len=8192,
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, 200 * running),
        prefix_caching=prefix_caching,
    )
    clock = Clock(Scheduler(config))
    rng = np.random.default_rng(0)
    rules = StopRules(max_tokens=2 * steps, stop_token_ids=frozenset({1, 2}))
    for index in range(running):
        prompt = rng.integers(3, 30_000, size=100 + index % 16).tolist()
        clock.scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, stop=rules))
    for _ in range(steps + 10):
        clock.step()
    per_seq_us = np.array(clock.step_us[10:]) / running
    assert set(clock.step_seqs[10:]) == {running}
    return {
        "steps": steps,
        "median_us_per_seq": round(float(np.median(per_seq_us)), 3),
        "p95_us_per_seq": round(float(np.quantile(per_seq_us, 0.95)), 3),
        "mean_us_per_seq": round(float(per_seq_us.mean()), 3),
        "median_us_per_step": round(float(np.median(per_seq_us)) * running, 1),
    }


def requests_of(shapes: list[RequestShape], max_len: int) -> Iterator[Request]:
    """Requests of these lengths with prompts that have nothing in common."""
    rng = np.random.default_rng(1)
    for index, shape in enumerate(shapes):
        prompt_len = min(shape.prompt_len, max_len - 1)
        yield Request(
            request_id=str(index),
            prompt_token_ids=rng.integers(3, 30_000, size=prompt_len, dtype=np.int32),
            stop=StopRules(max_tokens=shape.output_len, stop_token_ids=frozenset({1, 2})),
        )


def bench_trace(shapes: list[RequestShape], config: SchedulerConfig) -> dict[str, float]:
    """Serve requests of these lengths to the end, the queue never empty until the last."""
    clock = Clock(Scheduler(config))
    scheduler = clock.scheduler
    requests = requests_of(shapes, config.max_seq_len)
    used_blocks: list[int] = []
    start = time.perf_counter()
    while True:
        for request in islice(requests, max(0, config.max_num_seqs - scheduler.num_waiting)):
            scheduler.add(request)
        plan = clock.step()
        used_blocks.append(scheduler.num_used_blocks)
        if plan is None and not scheduler.has_unfinished():
            break
    elapsed_s = time.perf_counter() - start
    total_us, seqs = sum(clock.step_us), sum(clock.step_seqs)
    assert scheduler.num_used_blocks == 0
    return {
        "requests": len(shapes),
        "steps": len(clock.step_us),
        "tokens": clock.num_tokens,
        "mean_us_per_seq": round(total_us / seqs, 3),
        "mean_us_per_step": round(total_us / len(clock.step_us), 1),
        "p99_us_per_step": round(float(np.quantile(clock.step_us, 0.99)), 1),
        "max_us_per_step": round(max(clock.step_us), 1),
        "mean_seqs_per_step": round(seqs / len(clock.step_us), 1),
        "preemptions": scheduler.num_preemptions,
        "mean_blocks_used_share": round(float(np.mean(used_blocks)) / (config.num_blocks - 1), 3),
        "wall_s": round(elapsed_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="an Azure LLM inference trace (CSV)")
    parser.add_argument("--requests", type=int, default=100_000, help="requests to simulate")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps to time")
    parser.add_argument("--blocks", type=int, default=28_000, help="blocks of 16 tokens")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()
    caching = not args.no_prefix_caching

    rows: list[tuple[str, dict[str, float]]] = []
    for running in RUNNING:
        rows.append((f"decode_{running}", bench_decode(running, args.steps, caching)))
    if args.requests:
        if args.trace is None:
            shapes = synthetic(args.requests)
        else:
            shapes = azure_trace(args.trace, args.requests)
        config = SchedulerConfig(
            num_blocks=args.blocks, max_model_len=16_384, prefix_caching=caching
        )
        rows.append(("trace" if args.trace else "synthetic", bench_trace(shapes, config)))
    for case, figures in rows:
        options = {"block_size": 16, "prefix_caching": caching}
        record("scheduler", case, out=args.out, **options, **figures)
    print(f"\n{'case':12} {'us/sequence':>12} {'us/step':>10}")
    for case, figures in rows:
        per_seq = figures.get("median_us_per_seq", figures["mean_us_per_seq"])
        per_step = figures.get("median_us_per_step", figures.get("mean_us_per_step"))
        goal = f"  (target <= {TARGET_US:g})" if case == "decode_256" else ""
        print(f"{case:12} {per_seq:12.2f} {per_step:10.1f}{goal}")


if __name__ == "__main__":
    main()
