"""Latency of a decode step of the engine, against the least time its memory traffic takes.

    python -m benchmarks.bench_step --shape llama3.1-8b \\
        --cases 1x1024,8x1024,32x1024,128x1024,32x4000 --out benchmarks/results/step.jsonl
    python -m benchmarks.bench_step --cases 1x1024 --without-cuda-graphs
    python -m benchmarks.bench_step --cases 32x1024 --profile       (kernels by time as well)
    python -m benchmarks.bench_step --shape tiny --dtype float32 --cases 1x64,4x64 --steps 5

Every case is the engine's own compiled step on random weights and random keys and values: greedy,
the pool donated, tokens fed on the device, blocks in random order. `--batches` and `--contexts`
name their product instead of `--cases`. One JSON line per case, medians over `--repeats`:

- `step_us`: the device has always work: `--steps` steps are launched, then waited for.
- `caller_us`: the tokens of a step are read while the next one runs, as `Engine.step` does.
- `host_us`: packing the inputs and launching, the device idle.
- `floor_us`: weights plus keys and values, over the rate of a device copy (bytes read plus bytes
  written) in the same process. For GPUs: on a CPU the copy mostly pays for fresh pages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_profile import profile_device
from benchmarks.kernel_timing import median_seconds
from benchmarks.record import record
from benchmarks.shapes import SHAPES, StepBytes, random_model
from pagedjax import EngineConfig
from pagedjax.engine.batch import pack_inputs
from pagedjax.engine.block_tables import TableChanges, TableMirror
from pagedjax.engine.buckets import Bucket
from pagedjax.engine.compilation_cache import enable_compilation_cache
from pagedjax.engine.kv_pool import KVPool, KVSpec
from pagedjax.engine.logprobs import HostSamples
from pagedjax.engine.runner import ModelRunner
from pagedjax.engine.sampler import SampleOutputs
from pagedjax.loading import LoadedModel
from scheduler import StepPlan

BURST = 4  # launches that no queue holds up


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `context` positions, the new token's included."""

    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """From `32x1024`.

        Raises:
            ValueError: anything else.
        """
        batch, by, context = text.partition("x")
        if not by or not batch.isdigit() or not context.isdigit() or "0" in (batch, context):
            raise ValueError(f"a case is BATCHxCONTEXT, such as 32x1024; got {text!r}")
        return cls(int(batch), int(context))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"

    def blocks(self, block_size: int) -> int:
        """Blocks that its sequences fill."""
        return self.batch * -(-self.context // block_size)


class RandomKV(KVSpec):
    """A pool that holds random keys and values from the start."""

    __slots__ = ()

    def create(self, device: Any) -> KVPool:
        """Normal numbers on `device`."""
        (array,) = self.arrays
        fill = jax.jit(lambda key: jax.random.normal(key, array.shape, array.dtype))
        keys = [jax.random.key(layer) for layer in range(self.layers)]
        return [jax.block_until_ready(fill(jax.device_put(key, device))) for key in keys]


def decode_plan(case: Case, *, num_blocks: int, block_size: int, max_blocks: int) -> StepPlan:
    """Every sequence of the case decodes its last position; its token is the step before's."""
    per_seq = -(-case.context // block_size)
    order = 1 + np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32)
    tables = np.zeros((case.batch, max_blocks), np.int32)
    tables[:, :per_seq] = order[: case.batch * per_seq].reshape(case.batch, per_seq)
    rows, ones = np.arange(case.batch, dtype=np.int32), np.ones(case.batch, np.int32)
    start = case.context - 1
    return StepPlan(
        seq_ids=rows.tolist(), request_ids=[str(row) for row in rows],
        token_ids=np.zeros(case.batch, np.int32), block_tables=tables, starts=ones * start,
        counts=ones, sample_counts=ones, feed_rows=rows, drawn_rows=rows, num_tokens=case.batch,
        num_samples=case.batch, num_decodes=case.batch, preempted=(),
        copies=np.zeros((0, 2), np.int32),
    )  # fmt: skip


def make_runner(
    model: LoadedModel, cases: list[Case], *, block_size: int, **options: Any
) -> tuple[ModelRunner, int, int]:
    """A runner whose pool holds the largest case; also its blocks, and columns of its tables."""
    num_blocks = 1 + max(case.blocks(block_size) for case in cases)
    seqs, length = max(c.batch for c in cases), max(c.context for c in cases)
    max_blocks = -(-length // block_size)
    table = model.params["embed.table"]
    config = EngineConfig(
        block_size=block_size, num_blocks=num_blocks, max_model_len=max(length, 2),
        max_num_seqs=seqs, max_num_batched_tokens=max(seqs, 2048), **options,
    ).resolved(
        platform=next(iter(table.devices())).platform, max_positions=model.arch.max_positions
    )  # fmt: skip
    arch = model.arch
    spec = RandomKV(
        layers=arch.layers, num_blocks=num_blocks, kv_heads=arch.kv_heads, block_size=block_size,
        head_dim=arch.head_dim, dtype=table.dtype,
    )  # fmt: skip
    runner = ModelRunner(arch, model.params, spec, config, max_blocks_per_seq=max_blocks)
    return runner, num_blocks, max_blocks


def step_launcher(
    runner: ModelRunner, case: Case, *, num_blocks: int, block_size: int, max_blocks: int
) -> Callable[[], SampleOutputs]:
    """Packs and launches one step of the case."""
    sizes = {"block_size": block_size, "max_blocks": max_blocks}
    plan = decode_plan(case, num_blocks=num_blocks, **sizes)
    bucket = Bucket(case.batch, case.batch, decode=True)
    layout = runner.layout(bucket)
    rows, edits = TableMirror(case.batch, max_blocks, block_size).changes(plan)
    runner.edit_tables(edits, leave=0)
    tables = TableChanges(rows, edits[:0])

    def launch() -> SampleOutputs:
        return runner.launch(bucket, pack_inputs(plan, layout, tables), sampling=None)

    return launch


def saturated_seconds(launch: Callable[[], SampleOutputs], steps: int) -> float:
    """Per step, with the device never idle."""
    jax.block_until_ready(launch().token_ids)
    start = time.perf_counter()
    for _ in range(steps):
        last = launch()
    jax.block_until_ready(last.token_ids)
    return (time.perf_counter() - start) / steps


def caller_seconds(launch: Callable[[], SampleOutputs], steps: int) -> float:
    """Per step, for a caller who reads every step's tokens while the next step runs."""
    previous = launch()
    start = time.perf_counter()
    for _ in range(steps):
        current = launch()
        HostSamples.read(previous)
        previous = current
    HostSamples.read(previous)
    return (time.perf_counter() - start) / (steps + 1)


def host_seconds(launch: Callable[[], SampleOutputs]) -> float:
    """Per launch, in a burst that starts with an idle device."""
    start = time.perf_counter()
    for _ in range(BURST):
        last = launch()
    end = time.perf_counter()
    jax.block_until_ready(last.token_ids)
    return (end - start) / BURST


def copy_bytes_per_s(nbytes: int) -> float:
    """What a device copy of so many bytes moves, read and written counted."""
    x = jnp.ones((nbytes // 2,), jnp.bfloat16)
    seconds, _ = median_seconds(jax.jit(jnp.copy), (x,), 1)
    return 2 * x.nbytes / seconds


def measure(
    launch: Callable[[], SampleOutputs], moved: StepBytes, copy_rate: float, args: Any
) -> dict[str, Any]:
    """Figures of one case."""
    start = time.perf_counter()
    jax.block_until_ready(launch().token_ids)
    first_s = time.perf_counter() - start
    saturated_seconds(launch, args.steps)  # warms the device up
    laps = range(args.repeats)
    step = [saturated_seconds(launch, args.steps) for _ in laps]
    caller = [caller_seconds(launch, args.steps) for _ in laps]
    host = [host_seconds(launch) for _ in range(5 * args.repeats)]
    middle, floor = statistics.median(step), moved.total / copy_rate
    return {
        "step_us": round(middle * 1e6, 1), "spread": round(max(step) / min(step) - 1, 4),
        "caller_us": round(statistics.median(caller) * 1e6, 1),
        "host_us": round(statistics.median(host) * 1e6, 1),
        "floor_us": round(floor * 1e6, 1), "ratio_to_floor": round(middle / floor, 3),
        "weight_bytes": moved.weights, "kv_bytes": moved.kv,
        "copy_tb_per_s": round(copy_rate / 1e12, 3), "compile_s": round(first_s, 2),
    }  # fmt: skip


def profiled(launch: Callable[[], SampleOutputs], steps: int) -> dict[str, Any]:
    """See `device_profile`."""
    steps += 1  # the one that `saturated_seconds` waits for first
    return profile_device(lambda: saturated_seconds(launch, steps - 1)).figures(steps)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", help="BATCHxCONTEXT, separated by commas")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--steps", type=int, default=50, help="launched in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--implementation", help="backend of the paged operations")
    parser.add_argument("--without-cuda-graphs", action="store_true", help="kernel by kernel")
    parser.add_argument("--profile", action="store_true", help="add device_profile's figures")
    parser.add_argument("--copy-mib", type=int, help="size of the copy; default 2048, CPU 64")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    return parser


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    """`--cases`, or the product of `--batches` and `--contexts`."""
    named = args.cases or ",".join(
        f"{batch}x{context}"
        for context in args.contexts.split(",") for batch in args.batches.split(",")
    )  # fmt: skip
    return [Case.parse(text) for text in named.split(",")]


def main() -> None:
    args = options().parse_args()
    enable_compilation_cache()
    cases = chosen_cases(args)
    arch = SHAPES[args.shape]
    on_cpu = jax.default_backend() == "cpu"
    copy_rate = copy_bytes_per_s((args.copy_mib or (64 if on_cpu else 2048)) << 20)
    model = random_model(arch, args.dtype)
    size = args.block_size
    runner, num_blocks, max_blocks = make_runner(
        model, cases, block_size=size, implementation=args.implementation,
        cuda_graphs=not args.without_cuda_graphs,
    )  # fmt: skip
    for case in cases:
        launch = step_launcher(
            runner, case, num_blocks=num_blocks, block_size=size, max_blocks=max_blocks
        )
        itemsize = model.params["embed.table"].dtype.itemsize
        moved = StepBytes.of(arch, itemsize, batch=case.batch, context=case.context)
        record(
            "step", f"{args.shape} {args.dtype} {case}", args.out, batch=case.batch,
            context=case.context, steps=args.steps, repeats=args.repeats, block_size=size,
            xla_flags=os.environ.get("XLA_FLAGS", ""), weights="random",
            **({"without_cuda_graphs": True} if args.without_cuda_graphs else {}),
            **measure(launch, moved, copy_rate, args),
            **(profiled(launch, args.steps) if args.profile else {}),
        )  # fmt: skip


if __name__ == "__main__":
    main()
