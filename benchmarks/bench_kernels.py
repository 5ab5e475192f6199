"""Check, tune and time the attention kernels on the default device.

    python -m benchmarks.bench_kernels check
    python -m benchmarks.bench_kernels decode [--heads 32:8:128,40:40:128] [--seqs 1,8,32,128]
    python -m benchmarks.bench_kernels torch      the same for PyTorch, keys not paged

A timed function calls the kernel many times in one compiled program, each output being the next
query, over block tables that rotate through more memory than the L2 cache holds. One JSON line per
case: the median over repeats, the bytes of keys and values per second, and their share of what a
device copy moves (bytes read plus bytes written). `benchmarks.tuned_table` makes the kernels' table
of configurations from these lines.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import itertools
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_checks import COMPILE_THREADS, check
from benchmarks.record import record
from benchmarks.torch_attention import time_sdpa
from pallas_kernels.cases import DecodeCase, decode_cases, ragged_case
from pallas_kernels.decode_plan import plan_decode
from pallas_kernels.tuning import DecodeConfig, core_count

warnings.filterwarnings("ignore", category=DeprecationWarning, module="jax")

L2_BYTES = 60 << 20
OPTIONS: dict[str, Any] = {
    "window": None, "soft_cap": None, "sinks": None, "kv_scales": None, "return_lse": False,
}  # fmt: skip


def median_seconds(
    run: Callable[..., Any], args: tuple[Any, ...], calls: int, budget: float = 0.04
) -> tuple[float, float]:
    """Median and spread (largest over median, minus 1) of the time of one of `calls` calls."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    once = time.perf_counter() - start
    inner = max(1, round(budget / 5 / once))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(inner):
            last = run(*args)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / (inner * calls))
    middle = statistics.median(times)
    return middle, max(times) / middle - 1


def copy_bandwidth() -> float:
    """Bytes per second that a device copy moves, read and written counted."""
    x = jnp.ones((1 << 30,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    seconds, _ = median_seconds(copy, (x,), 1)
    return 2 * x.nbytes / seconds


def random_pool(blocks: int, case: DecodeCase) -> jax.Array:
    """A pool of random numbers; large ones repeat a piece of 256 MiB."""
    shape = (2, case.kv_heads, case.block_size, case.head_dim)
    piece = min(blocks, (128 << 20) // int(np.prod(shape)))

    @jax.jit
    def fill() -> jax.Array:
        x = jax.random.normal(jax.random.key(0), (piece, *shape), jnp.bfloat16)
        x = x.astype(case.kv_dtype)
        return jnp.tile(x, (-(-blocks // piece), 1, 1, 1, 1))

    return jax.block_until_ready(fill())


@dataclasses.dataclass(frozen=True)
class Variant:
    """One implementation with one configuration."""

    backend: str
    config: DecodeConfig

    def __str__(self) -> str:
        c = self.config
        return f"{self.backend}:{c.tile}x{c.stages}w{c.num_warps}@{c.workers}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Inverse of `str`."""
        backend, tile, stages, warps, workers = re.fullmatch(
            r"(\w+):(\d+)x(\d+)w(\d+)@(\d+)", text
        ).groups()  # type: ignore[union-attr]
        sizes = {"tile": tile, "stages": stages, "num_warps": warps, "workers": workers}
        return cls(backend, DecodeConfig(**{name: int(x) for name, x in sizes.items()}))

    def attention(self) -> Callable[..., Any]:
        module = importlib.import_module(f"pallas_kernels.paged_decode_{self.backend}")
        return module.paged_decode_attention


def variants(case: DecodeCase, backends: list[str]) -> Iterator[Variant]:
    """Configurations worth timing: those whose stages fit into shared memory."""
    tile_bytes = 2 * case.head_dim * jnp.dtype(case.kv_dtype).itemsize
    for backend in backends:
        if backend == "mosaic" and case.kv_dtype != "bfloat16":
            continue
        for tile, per_core in itertools.product((32, 64, 128), (1, 2, 3, 4)):
            room = (227 << 10) // per_core - (10 << 10 if backend == "mosaic" else 2 << 10)
            stages = room // (tile * tile_bytes)
            if backend == "mosaic" and (tile == 32 or per_core == 4 or stages < 2):
                continue
            if backend == "triton" and (per_core == 1 or stages < 2):
                continue
            stages = min(stages, 8 if backend == "mosaic" else 4)
            workers = per_core * core_count()
            yield Variant(backend, DecodeConfig(tile=tile, stages=stages, workers=workers))


@dataclasses.dataclass
class Workload:
    """Arrays of one decode case."""

    case: DecodeCase
    calls: int  # different calls, unrolled
    loops: int  # how often one run repeats them
    tables: list[jax.Array]
    lens: np.ndarray
    q: jax.Array

    @classmethod
    def of(cls, case: DecodeCase, blocks: int) -> Workload:
        lens = np.asarray(case.seq_lens, np.int32)
        columns = -(-int(lens.max()) // case.block_size)
        kv_bytes = case.kv_bytes
        rotations = int(np.clip(-(-4 * L2_BYTES // kv_bytes), 1, 64))
        rng = np.random.default_rng(0)
        need = rotations * len(lens) * columns
        order = np.concatenate(
            [1 + rng.permutation(blocks - 1) for _ in range(-(-need // (blocks - 1)))]
        )
        tables = order[:need].reshape(rotations, len(lens), columns).astype(np.int32)
        calls = max(rotations, 16 if kv_bytes < 1 << 29 else 4)
        loops = max(1, round(5e-3 / (calls * (5e-6 + kv_bytes / 4e12))))
        q = jax.random.normal(
            jax.random.key(1), (len(lens), case.q_heads, case.head_dim), jnp.bfloat16
        )
        return cls(case, calls, loops, [jnp.asarray(t) for t in tables], lens, q)

    def build(self, variant: Variant, pool: jax.Array) -> Any:
        """Compile `calls` chained calls."""
        attention, case = variant.attention(), self.case
        scales = None if pool.dtype == self.q.dtype else jnp.ones((2, case.kv_heads), jnp.float32)

        @jax.jit
        def once(
            q: jax.Array, pool: jax.Array, table: jax.Array, lens: jax.Array, plan: jax.Array
        ) -> Any:
            options = OPTIONS | {"scale": case.head_dim**-0.5, "kv_scales": scales}
            return attention(q, pool, table, lens, plan=plan, config=variant.config, **options)

        def chain(q: jax.Array, pool: jax.Array, tables: Any, lens: jax.Array, plan: Any) -> Any:
            def calls(_: Any, q: jax.Array) -> jax.Array:
                for i in range(self.calls):  # unrolled: captured as one CUDA graph
                    q = once(q, pool, tables[i % len(tables)], lens, plan)
                return q

            return jax.lax.fori_loop(0, self.loops, calls, q)

        args = (self.q, pool, self.tables, jnp.asarray(self.lens), self.plan(variant))
        return jax.jit(chain).lower(*args).compile(), args

    def plan(self, variant: Variant) -> jax.Array:
        config = variant.config
        parts = config.parts(self.case.kv_heads)
        plan = plan_decode(self.lens, tile=config.tile, parts=parts)
        return jnp.asarray(plan)


def bench_decode(args: argparse.Namespace) -> None:
    """Time every case with its best (or every) configuration."""
    ceiling = copy_bandwidth()
    print(f"copy {ceiling / 1e12:.2f} TB/s", flush=True)
    backends = args.backends.split(",")
    table = []
    for _, group in itertools.groupby(selected_cases(args), key=lambda c: c.pool_key):
        cases = list(group)
        blocks = 2 + max(max(c.blocks for c in cases), (1 << 30) // cases[0].block_bytes)
        pool = random_pool(blocks, cases[0])
        for case in cases:
            table += time_case(case, Workload.of(case, blocks), pool, backends, ceiling, args)
        del pool
    print(f"{'case':34} {'variant':22} {'us':>9} {'TB/s':>6} {'copy':>5}")
    for row in table:
        print("{case:34} {variant:22} {us:9.2f} {tb_s:6.3f} {share:5.2f}".format(**row))


def time_case(
    case: DecodeCase,
    work: Workload,
    pool: jax.Array,
    backends: list[str],
    ceiling: float,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    candidates = list(variants(case, backends))
    if args.only:
        candidates = [Variant.parse(text) for text in args.only.split(",")]
    rows = []
    with concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS) as threads:
        built = [(v, threads.submit(work.build, v, pool)) for v in candidates]
        for variant, future in built:
            try:
                run, run_args = future.result()
            except (NotImplementedError, jax.errors.JaxRuntimeError, ValueError) as error:
                print(f"{case.name} {variant}: {str(error)[:200]!r}", flush=True)
                continue
            seconds, spread = median_seconds(run, run_args, work.calls * work.loops)
            row = {
                "case": case.name,
                "variant": str(variant),
                "us": seconds * 1e6,
                "tb_s": case.kv_bytes / seconds / 1e12,
                "share": case.kv_bytes / seconds / ceiling,
            }
            rows.append(row)
            record(
                "paged_decode", case.name, args.out, implementation=variant.backend,
                median_us=round(row["us"], 3), spread=round(spread, 4), kv_bytes=case.kv_bytes,
                tb_per_s=round(row["tb_s"], 4), copy_share=round(row["share"], 4),
                copy_tb_per_s=round(ceiling / 1e12, 3), calls=work.calls,
                rotations=len(work.tables), **dataclasses.asdict(variant.config),
            )  # fmt: skip
    rows.sort(key=lambda row: row["us"])
    best = [next((r for r in rows if r["variant"].startswith(b)), None) for b in backends]
    return [row for row in best if row is not None] if args.best else rows


def selected_cases(args: argparse.Namespace) -> list[DecodeCase]:
    """The cases that the command line names."""
    heads = [tuple(map(int, h.split(":"))) for h in args.heads.split(",")]
    cases = decode_cases(
        heads=heads,
        seqs=[int(x) for x in args.seqs.split(",")],
        contexts=[int(x) for x in args.contexts.split(",")],
        block_sizes=[int(x) for x in args.block_sizes.split(",")],
        kv_dtypes=args.kv_dtypes.split(","),
    )
    if args.ragged:
        cases = [twin for case in cases for twin in (case, ragged_case(case, seed=0))]
    skip = [tuple(map(int, s.split("x"))) for s in args.skip.split(",") if s]
    return [c for c in cases if (len(c.seq_lens), max(c.seq_lens)) not in skip]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["check", "decode", "torch"])
    parser.add_argument("--backends", default="mosaic,triton")
    parser.add_argument("--heads", default="32:8:128,40:40:128", help="query:key/value:head_dim")
    parser.add_argument("--seqs", default="1,8,32,128")
    parser.add_argument("--contexts", default="1024,4096,32768")
    parser.add_argument("--block-sizes", default="16")
    parser.add_argument("--kv-dtypes", default="bfloat16")
    parser.add_argument("--skip", default="", help="cells to leave out, such as 128x32768")
    parser.add_argument(
        "--ragged", action="store_true", help="each case with lognormal lengths, too"
    )
    parser.add_argument("--only", default="", help="variants to time, such as mosaic:64x3w4@264")
    parser.add_argument("--best", action="store_true", help="list only the best of each backend")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file as well")
    args = parser.parse_args()
    if args.what == "check":
        raise SystemExit(not check(args.backends.split(",")))
    if args.what == "torch":
        for case in selected_cases(args):
            time_sdpa(case, L2_BYTES, args.out)
    else:
        bench_decode(args)


if __name__ == "__main__":
    main()
