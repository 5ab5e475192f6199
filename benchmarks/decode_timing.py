"""Times of the paged decode kernels; see `bench_kernels`."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_timing import (
    L2_BYTES,
    copy_bandwidth,
    median_seconds,
    random_pool,
    read_bandwidth,
)
from benchmarks.record import record
from pallas_kernels.cases import DecodeCase, decode_cases, ragged_case
from pallas_kernels.decode_plan import DecodePlan, plan_decode
from pallas_kernels.tuning import DecodeConfig, core_count

COMPILE_THREADS = 12
OPTIONS: dict[str, Any] = {
    "window": None, "soft_cap": None, "sinks": None, "kv_scales": None, "return_lse": False,
}  # fmt: skip


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
            sizes = {"tile": tile, "stages": stages, "workers": per_core * core_count()}
            for num_warps in (4,) if backend == "mosaic" else (2, 4):
                yield Variant(backend, DecodeConfig(**sizes, num_warps=num_warps))


@dataclasses.dataclass
class Workload:
    """Arrays of one decode case."""

    case: DecodeCase
    rows: int  # queries of each sequence
    calls: int  # different calls, unrolled
    loops: int  # how often one run repeats them
    tables: list[jax.Array]
    lens: np.ndarray
    q: jax.Array

    @classmethod
    def of(cls, case: DecodeCase, blocks: int, rows: int) -> Workload:
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
        q_rows = (rows,) if rows > 1 else ()
        q_shape = (len(lens), *q_rows, case.q_heads, case.head_dim)
        q = jax.random.normal(jax.random.key(1), q_shape, jnp.bfloat16)
        return cls(case, rows, calls, loops, [jnp.asarray(t) for t in tables], lens, q)

    def build(self, variant: Variant, pool: jax.Array) -> Any:
        """Compile `calls` chained calls."""
        attention, case = variant.attention(), self.case
        scales = None if pool.dtype == self.q.dtype else jnp.ones((2, case.kv_heads), jnp.float32)

        @jax.jit
        def once(
            q: jax.Array, pool: jax.Array, table: jax.Array, lens: jax.Array, plan: DecodePlan
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

    def plan(self, variant: Variant) -> DecodePlan:
        config = variant.config
        parts = config.parts(self.case.kv_heads)
        plan = plan_decode(self.lens, tile=config.tile, parts=parts)
        return DecodePlan(*map(jnp.asarray, plan))


def bench_decode(args: argparse.Namespace) -> None:
    """Time every case with its best (or every) configuration."""
    ceilings = {"copy": copy_bandwidth(), "read": read_bandwidth()}
    print(", ".join(f"{name} {x / 1e12:.2f} TB/s" for name, x in ceilings.items()), flush=True)
    backends = args.backends.split(",")
    table = []
    for _, group in itertools.groupby(selected_cases(args), key=lambda c: c.pool_key):
        cases = list(group)
        blocks = 2 + max(max(c.blocks for c in cases), (1 << 30) // cases[0].block_bytes)
        kv_heads, head_dim, block_size, kv_dtype = cases[0].pool_key
        pool = random_pool(blocks, kv_heads, block_size, head_dim, kv_dtype)
        for case in cases:
            work = Workload.of(case, blocks, args.rows)
            table += time_case(work, pool, backends, ceilings, args)
        del pool
    print(f"{'case':34} {'variant':22} {'us':>9} {'TB/s':>6} {'copy':>5} {'read':>5}")
    for row in table:
        print("{case:34} {variant:22} {us:9.2f} {tb_s:6.3f} {copy:5.2f} {read:5.2f}".format(**row))


def time_case(
    work: Workload,
    pool: jax.Array,
    backends: list[str],
    ceilings: dict[str, float],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Time one case with every configuration, record each, and return them, fastest first."""
    case = work.case
    candidates = list(variants(case, backends))
    if args.only:
        candidates = [Variant.parse(text) for text in args.only.split(",")]
    name = case.name + (f" rows {work.rows}" if work.rows > 1 else "")
    rows = []
    with concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS) as threads:
        built = [(v, threads.submit(work.build, v, pool)) for v in candidates]
        for variant, future in built:
            try:
                run, run_args = future.result()
            except (NotImplementedError, jax.errors.JaxRuntimeError, ValueError) as error:
                print(f"{name} {variant}: {str(error)[:200]!r}", flush=True)
                continue
            seconds, spread = median_seconds(run, run_args, work.calls * work.loops)
            row = {
                "case": name,
                "variant": str(variant),
                "us": seconds * 1e6,
                "tb_s": case.kv_bytes / seconds / 1e12,
                **{name: case.kv_bytes / seconds / x for name, x in ceilings.items()},
            }
            rows.append(row)
            record(
                "paged_decode", name, args.out, implementation=variant.backend,
                median_us=round(row["us"], 3), spread=round(spread, 4), kv_bytes=case.kv_bytes,
                tb_per_s=round(row["tb_s"], 4), calls=work.calls, rotations=len(work.tables),
                **{f"{name}_share": round(row[name], 4) for name in ceilings},
                **{f"{name}_tb_per_s": round(x / 1e12, 3) for name, x in ceilings.items()},
                **dataclasses.asdict(variant.config),
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
