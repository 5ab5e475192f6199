"""Where the device's time goes in the middle of a run with many sequences.

    python -m benchmarks.profile_steps --shape llama3.1-8b --out benchmarks/results/profile.jsonl
    python -m benchmarks.profile_steps --shape qwen3-0.6b --workload nano --at 30 200 500 800
    python -m benchmarks.profile_steps --shape tiny --dtype float32 --limit 4 --at 4 --steps 6

All requests of a list, by default 256 of one length, start together on an engine with random
weights. At each of the steps `--at` come `--steps` steps, and then as many under the profiler: the
first ones say how much it slows the run down. One JSON line for each, with what these steps read
of the KV cache.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.device_profile import profile_device
from benchmarks.random_engine import add_engine_options, case_name, exact_length, random_engine
from benchmarks.record import record
from benchmarks.request_lists import add_list_options, longest, random_prompts, request_lists
from benchmarks.workloads import RequestShape
from pagedjax.engine.engine import Engine
from pagedjax.heap import settled_heap

STRETCHES = 2  # of --steps steps: without the profiler, and under it


def start(engine: Engine, shapes: list[RequestShape]) -> None:
    """Add the requests."""
    for index, prompt in enumerate(random_prompts(shapes, engine.arch.vocab)):
        engine.add_request(str(index), None, prompt, exact_length(shapes[index].output_len))


def end(engine: Engine, requests: int) -> None:
    """Give up what is left of them."""
    for index in range(requests):
        engine.abort(str(index))
    while engine.has_unfinished():
        engine.step()


def run_steps(engine: Engine, steps: int) -> float:
    """Seconds that `steps` steps take.

    Raises:
        RuntimeError: the requests end before.
    """
    with settled_heap():
        begin = time.perf_counter()
        for step in range(steps):
            if not engine.has_unfinished():
                raise RuntimeError(f"want {steps} steps, the requests ended after {step}")
            engine.step()
        return time.perf_counter() - begin


def figures(engine: Engine, steps: int) -> dict[str, Any]:
    """The two stretches, one after another."""
    plain = run_steps(engine, steps)
    running, cached = engine.stats().num_running, cached_tokens(engine)
    kernels = profile_device(lambda: run_steps(engine, steps)).figures(steps)
    token_bytes = engine.kv_spec.block_bytes // engine.kv_spec.block_size
    return {
        **kernels,
        "step_us": round(plain / steps * 1e6, 1),
        "running_at_start": running,
        "running_at_end": engine.stats().num_running,
        "kv_bytes_at_start": cached * token_bytes,
        "kv_bytes_at_end": cached_tokens(engine) * token_bytes,
        "preemptions": engine.stats().preemptions,
        "compiles_after_warmup": engine.stats().compiles_after_warmup,
    }


def cached_tokens(engine: Engine) -> int:
    """Tokens of all running sequences whose keys and values are in the pool."""
    return sum(seq.num_computed for seq in engine._scheduler.sequences())


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_list_options(parser)
    parser.add_argument("--sequences", type=int, default=256, help="without a list")
    parser.add_argument("--prompt-len", type=int, default=512, help="without a list")
    parser.add_argument("--at", type=int, nargs="+", default=[150], help="steps before")
    parser.add_argument("--steps", type=int, default=100, help="per stretch, of which there are 2")
    add_engine_options(parser)
    return parser


def starts(args: argparse.Namespace) -> list[int]:
    """Steps before each look; what comes too early for the one before is put off."""
    found: list[int] = []
    free = 0
    for at in sorted(args.at):
        found.append(max(at, free))
        free = found[-1] + STRETCHES * args.steps
    return found


def loads(args: argparse.Namespace) -> dict[str, list[RequestShape]]:
    """The lists that the options name; else sequences of one length that live to the end."""
    if args.workload or args.requests:
        return request_lists(args.workload, args.requests, args.limit)
    steps = starts(args)[-1] + STRETCHES * args.steps
    shapes = [RequestShape(args.prompt_len, steps + 2, 0.0)] * args.sequences  # a token each step
    return {f"{args.sequences}x{args.prompt_len}": shapes[: args.limit]}


def main() -> None:
    args = options().parse_args()
    lists = loads(args)
    engine, started = random_engine(args, max(map(longest, lists.values())))
    for name, shapes in lists.items():
        start(engine, shapes)
        done = 0
        for at in starts(args):
            run_steps(engine, at - done)
            record(
                "profile", f"{case_name(args, name)}, step {at}", args.out,
                sequences=len(shapes), at=at, steps=args.steps,
                **figures(engine, args.steps), **started, weights="random",
            )  # fmt: skip
            done = at + STRETCHES * args.steps
        end(engine, len(shapes))


if __name__ == "__main__":
    main()
