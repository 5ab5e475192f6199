"""Where the device's time goes in the middle of a run with many sequences.

    python -m benchmarks.profile_steps --shape llama3.1-8b --out benchmarks/results/profile.jsonl
    python -m benchmarks.profile_steps --shape tiny --dtype float32 --sequences 4 --skip 4 --steps 6

`--sequences` requests of random prompts start together on an engine with random weights. After
`--skip` steps come `--steps` steps under the profiler. Before them, as many steps without it say
how much it slows the run down. One JSON line.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.device_profile import profile_device
from benchmarks.random_engine import add_engine_options, case_name, exact_length, random_engine
from benchmarks.record import record
from benchmarks.request_lists import longest, random_prompts
from benchmarks.workloads import RequestShape
from pagedjax.engine.engine import Engine

STRETCHES = 2  # of --steps steps: without the profiler, and under it


def start(engine: Engine, shapes: list[RequestShape], skip: int) -> None:
    """Add the requests and run the first `skip` steps."""
    for index, prompt in enumerate(random_prompts(shapes, engine.arch.vocab)):
        engine.add_request(str(index), None, prompt, exact_length(shapes[index].output_len))
    run_steps(engine, skip)


def run_steps(engine: Engine, steps: int) -> float:
    """Seconds that `steps` steps take.

    Raises:
        RuntimeError: the requests end before.
    """
    begin = time.perf_counter()
    for step in range(steps):
        if not engine.has_unfinished():
            raise RuntimeError(f"want {steps} steps, the requests ended after {step}")
        engine.step()
    return time.perf_counter() - begin


def figures(engine: Engine, steps: int) -> dict[str, Any]:
    """The stretches, one after another."""
    plain = run_steps(engine, steps)
    running = engine.stats().num_running
    kernels = profile_device(lambda: run_steps(engine, steps)).figures(steps)
    return {
        **kernels,
        "step_us": round(plain / steps * 1e6, 1),
        "running_at_start": running,
        "running_at_end": engine.stats().num_running,
        "preemptions": engine.stats().preemptions,
        "compiles_after_warmup": engine.stats().compiles_after_warmup,
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100, help="per stretch, of which there are 2")
    parser.add_argument("--skip", type=int, default=150, help="steps before, prefill among them")
    add_engine_options(parser)
    return parser


def main() -> None:
    args = options().parse_args()
    # Every sequence lives to the end; a step gives each at most one token.
    output_len = args.skip + STRETCHES * args.steps + 2
    shapes = [RequestShape(args.prompt_len, output_len, 0.0)] * args.sequences
    engine, started = random_engine(args, longest(shapes))
    start(engine, shapes, args.skip)
    record(
        "profile", case_name(args, f"{args.sequences}x{args.prompt_len}"), args.out,
        sequences=args.sequences, prompt_len=args.prompt_len, steps=args.steps, skip=args.skip,
        **figures(engine, args.steps), **started, weights="random",
    )  # fmt: skip


if __name__ == "__main__":
    main()
