"""How long the host takes to plan: `python -m benchmarks.bench_scheduler [--trace PATH]`.

Three questions, all without a model, the loop one plan ahead as the engine runs it:

- `decode_N`: microseconds per scheduled sequence, `schedule` and `update` together, while N
  sequences decode.
- `trace`: the same over a simulation of many requests with the lengths of a trace, as fast as
  the budgets let them through, prompts without a common prefix.
- `caching_cost_*`: what prefix caching adds to both where it finds nothing. Two schedulers, with it
  and without, plan the same steps by turns. `one_percent_ms` is the step that it adds 1 % to if
  nothing hides the planning; the engine plans while the device computes the step before.

Times are CPU times of this process, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from benchmarks.record import record
from benchmarks.workloads import RequestShape, azure_trace, synthetic
from scheduler import Request, Scheduler, SchedulerConfig, StepPlan, StopRules

RUNNING = (1, 64, 256)
TARGET_US = 5.0  # per scheduled sequence at 256 running
ROOMY = 8  # times the pool: so large that nothing is preempted


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
            self.step_seqs.append(plan.num_seqs)
            self.num_tokens += plan.num_tokens
        return plan


def decode_clock(running: int, steps: int, prefix_caching: bool) -> Clock:
    """A scheduler with `running` sequences that decode for at least `steps` steps."""
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
    return clock


def bench_decode(running: int, steps: int, prefix_caching: bool) -> dict[str, float]:
    """Plan `steps` steps in which `running` sequences decode."""
    clock = decode_clock(running, steps, prefix_caching)
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


def decoding(clock: Clock, steps: int) -> Iterator[None]:
    """One step at a time."""
    for _ in range(steps):
        clock.step()
        yield


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


def turns(clock: Clock, shapes: list[RequestShape]) -> Iterator[None]:
    """Serve requests of these lengths to the end, the queue never empty until the last."""
    scheduler = clock.scheduler
    config = scheduler.config
    requests = requests_of(shapes, config.max_seq_len)
    while True:
        for request in islice(requests, max(0, config.max_num_seqs - scheduler.num_waiting)):
            scheduler.add(request)
        plan = clock.step()
        yield
        if plan is None and not scheduler.has_unfinished():
            break


def bench_trace(shapes: list[RequestShape], config: SchedulerConfig) -> dict[str, float]:
    """Serve requests of these lengths to the end."""
    clock = Clock(Scheduler(config))
    scheduler = clock.scheduler
    start = time.perf_counter()
    used_blocks = [scheduler.num_used_blocks for _ in turns(clock, shapes)]
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


def bench_caching_cost(
    clocks: dict[bool, Clock], loops: dict[bool, Iterator[None]]
) -> dict[str, float]:
    """Run a scheduler with prefix caching and one without by turns.

    Args:
        clocks: with it at True, without it at False; nothing that is asked of them has a prefix in
            common.
        loops: what advances each of them by a step at a time, both through the same steps.
    """
    ended: set[bool] = set()
    for turn in count():
        # Whoever comes second finds warm caches: each does in every other turn.
        ended |= {name for name in (turn % 2 > 0, turn % 2 == 0) if next(loops[name], 1)}
        if ended:
            break
    plain, caching = clocks[False], clocks[True]
    assert caching.step_seqs == plain.step_seqs, "not the same steps"
    assert caching.scheduler.blocks.admission.num_hit_tokens == 0, "a prefix was found"
    means = {name: float(np.mean(clock.step_us)) for name, clock in clocks.items()}
    added = means[True] - means[False]
    return {
        "steps": len(plain.step_us),
        "mean_seqs_per_step": round(float(np.mean(plain.step_seqs)), 1),
        "tokens_per_step": round(plain.num_tokens / len(plain.step_us), 1),
        "without_us_per_step": round(means[False], 2),
        "with_us_per_step": round(means[True], 2),
        "added_us_per_step": round(added, 2),
        "added_share_of_planning": round(added / means[False], 4),
        "one_percent_ms": round(added / 10, 3),
    }


def caching_cost_of_decode(running: int, steps: int) -> dict[str, float]:
    """While so many sequences decode."""
    clocks = {caching: decode_clock(running, steps, caching) for caching in (False, True)}
    loops = {caching: decoding(clock, steps) for caching, clock in clocks.items()}
    return bench_caching_cost(clocks, loops)


def caching_cost_of_trace(shapes: list[RequestShape], config: SchedulerConfig) -> dict[str, float]:
    """While requests of these lengths come and go.

    Args:
        shapes: the requests.
        config: with a pool in which nothing is preempted: what is admitted again may be found.
    """
    clocks = {
        caching: Clock(Scheduler(replace(config, prefix_caching=caching)))
        for caching in (False, True)
    }
    loops = {caching: turns(clock, shapes) for caching, clock in clocks.items()}
    figures = bench_caching_cost(clocks, loops)
    assert not any(clock.scheduler.num_preemptions for clock in clocks.values())
    return figures


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
    costs: list[tuple[str, dict[str, float]]] = []
    for running in RUNNING:
        rows.append((f"decode_{running}", bench_decode(running, args.steps, caching)))
        costs.append(
            (f"caching_cost_decode_{running}", caching_cost_of_decode(running, args.steps))
        )
    if args.requests:
        if args.trace is None:
            shapes = synthetic(args.requests)
        else:
            shapes = azure_trace(args.trace, args.requests)
        config = SchedulerConfig(
            num_blocks=args.blocks, max_model_len=16_384, prefix_caching=caching
        )
        name = "trace" if args.trace else "synthetic"
        rows.append((name, bench_trace(shapes, config)))
        roomy = replace(config, num_blocks=ROOMY * config.num_blocks)
        some = shapes[: args.requests // 5]
        costs.append((f"caching_cost_{name}", caching_cost_of_trace(some, roomy)))
    for case, figures in rows:
        options = {"block_size": 16, "prefix_caching": caching}
        record("scheduler", case, out=args.out, **options, **figures)
    for case, figures in costs:
        record("scheduler", case, out=args.out, block_size=16, **figures)
    print(f"\n{'case':12} {'us/sequence':>12} {'us/step':>10}")
    for case, figures in rows:
        per_seq = figures.get("median_us_per_seq", figures["mean_us_per_seq"])
        per_step = figures.get("median_us_per_step", figures.get("mean_us_per_step"))
        goal = f"  (target <= {TARGET_US:g})" if case == "decode_256" else ""
        print(f"{case:12} {per_seq:12.2f} {per_step:10.1f}{goal}")
    print(f"\n{'prefix caching adds, without hits':33} {'us/step':>10} {'1 % of, ms':>12}")
    for case, figures in costs:
        added, step_ms = figures["added_us_per_step"], figures["one_percent_ms"]
        print(f"{case.removeprefix('caching_cost_'):33} {added:10.1f} {step_ms:12.2f}")


if __name__ == "__main__":
    main()
