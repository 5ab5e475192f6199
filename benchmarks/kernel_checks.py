"""Correctness of the attention kernels on the device at hand; see `bench_kernels check`.

Problems cover every pair of levels of all factors (heads, sizes, dtypes, options, batches). Each
draws fresh random inputs; what no sequence owns holds NaN (slots) or names no block (table
entries). It runs twice, in memory full of NaN, for equal bits, and is compared with numpy in
float64. Pools of more than 2**31 elements are addressed at their end.

    python -m benchmarks.kernel_checks --small [--kernels mosaic:decode,triton:prefill]

runs one tiny problem per kernel in one process, which is what compute-sanitizer has patience for.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import random
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

import pallas_kernels
from benchmarks.record import record
from pallas_kernels import Implementation
from tests.kernels import dense_attention

PROCESSES = 12
# Largest error, relative error in the 2-norm, error of the lse: by the dtype of the products.
BOUNDS = {
    "bfloat16": (2e-2, 5e-3, 2e-3),
    "float16": (4e-3, 1e-3, 2e-3),
    "float32": (1e-4, 1e-5, 1e-4),
}
LARGE_POOLS = (("bfloat16", 2**31), ("float8_e4m3fn", 2**31), ("float8_e4m3fn", 2**32))
NO_BLOCK = 1_000_000_007  # a table entry that nobody may follow; odd, or its address may wrap

Figures = dict[str, int | float | str | bool | None]
Job = tuple[str, Callable[..., list[Figures]], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of `paged_decode_attention`, or of `paged_prefill_attention` if `prefill`."""

    lens: tuple[int, ...] = (40, 0, 17)
    rows: tuple[int, ...] | int = 1  # of each sequence
    prefill: bool = False
    shared: int = 0  # positions that all sequences have in common
    heads: tuple[int, int] = (2, 2)  # key/value heads, query heads of each
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    plain_keys: bool = False  # a pair of arrays, of which only the values are of `kv_dtype`
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        kind = "prefill" if self.prefill else "shared" if self.shared else "decode"
        kv_heads, group = self.heads
        options = [f"window {self.window}"] * bool(self.window)
        options += [f"soft cap {self.soft_cap}"] * bool(self.soft_cap) + ["sinks"] * self.sinks
        rows = "" if self.prefill else f" {self.rows} rows"
        stored = f"{self.dtype}+{self.kv_dtype}" if self.plain_keys else self.kv_dtype
        return (
            f"{kind}{rows} {kv_heads * group}:{kv_heads}:{self.head_dim} b{self.block_size} "
            f"{self.dtype}/{stored} {len(self.lens)}x{max(self.lens)} " + ", ".join(options)
        ).strip()


LENS = (0, 1, 15, 16, 17, 63, 64, 65, 129, 500, 1024)
FACTORS: dict[str, Sequence[dict[str, Any]]] = {
    "heads": [{"heads": h} for h in ((4, 1), (8, 4), (2, 7), (2, 16), (3, 3))],
    "head_dim": [{"head_dim": d} for d in (64, 80, 96, 112, 128, 192, 256)],
    "block_size": [{"block_size": b} for b in (16, 32, 64, 128)],
    "dtypes": [
        {"dtype": q, "kv_dtype": kv}
        for q, kv in (
            ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float16", "float16"),
            ("float16", "int8"), ("float32", "float32"),
        )
    ],
    "options": [
        {}, {"window": 100}, {"soft_cap": 2.0}, {"sinks": True},
        {"window": 33, "soft_cap": 4.0, "sinks": True},
    ],
}  # fmt: skip
DECODE_BATCHES: Sequence[dict[str, Any]] = [
    {"lens": LENS}, {"lens": LENS, "rows": 3}, {"lens": LENS[:6], "rows": 8}, {"lens": (5000, 3)},
]  # fmt: skip
PREFILL_BATCHES: Sequence[dict[str, Any]] = [
    {"lens": (100, 20, 300, 0, 513, 1), "rows": (37, 20, 300, 2, 130, 1), "prefill": True},
    {"lens": (512, 256, 1024), "rows": (512, 128, 128), "prefill": True},
    {"lens": (64, 130, 37), "rows": (1, 5, 16), "prefill": True},
]
SHARED = [
    Problem(lens=(645, 0, 704, 641, 900), shared=640, heads=(8, 4)),
    Problem(lens=(1300,) * 40, shared=1280, heads=(4, 7), block_size=64, sinks=True),
    Problem(lens=(1301, 1400), shared=1280, rows=4, heads=(2, 1), soft_cap=2.0, block_size=128),
    Problem(lens=(645, 0, 704), shared=640, heads=(4, 4), kv_dtype="float8_e4m3fn"),
]
OTHERS = [
    Problem(lens=LENS, heads=(1, 32), window=100),
    Problem(lens=(70_000, 3), heads=(2, 4)),
    Problem(lens=(20_000,), rows=(300,), prefill=True, heads=(1, 2)),
]
PAIRS = [
    Problem(lens=LENS, heads=(8, 4), kv_dtype="float8_e4m3fn", plain_keys=True),
    Problem(
        lens=LENS, heads=(2, 7), head_dim=80, dtype="float16", kv_dtype="int8", plain_keys=True,
        window=100, sinks=True,
    ),
    Problem(
        lens=(100, 20, 300, 0, 513, 1), rows=(37, 20, 300, 2, 130, 1), prefill=True, heads=(4, 3),
        kv_dtype="float8_e4m3fn", plain_keys=True,
    ),
    Problem(
        lens=(645, 0, 704), shared=640, heads=(4, 4), kv_dtype="float8_e4m3fn", plain_keys=True
    ),
]  # fmt: skip
# Key/value heads, head_dim and dtype of the pool.
WRITES = [(8, 128, "bfloat16"), (3, 80, "float16"), (40, 64, "float8_e4m3fn"), (4, 192, "int8")]
SMALL = {
    "decode": Problem(head_dim=64),
    "rows": Problem(rows=3, head_dim=64),
    "fp8": Problem(kv_dtype="float8_e4m3fn"),
    "prefill": Problem(rows=(40, 2, 5), prefill=True, head_dim=64),
    "fp8prefill": Problem(rows=(40, 2, 5), prefill=True, head_dim=64, kv_dtype="float8_e4m3fn"),
    "shared": Problem(lens=(140, 0, 150), shared=128, head_dim=64),
}


def pairwise(factors: Sequence[Sequence[dict[str, Any]]]) -> list[Problem]:
    """Problems in which every two levels of two factors meet at least once; always the same."""
    rng = random.Random(0)
    levels = [range(len(factor)) for factor in factors]
    places = list(itertools.combinations(range(len(factors)), 2))
    missing = {(a, i, b, j) for a, b in places for i in levels[a] for j in levels[b]}
    problems = []
    while missing:
        a, i, b, j = min(missing)
        tries = []
        for _ in range(100):
            row = [rng.choice(level) for level in levels]
            row[a], row[b] = i, j
            tries.append((len({(x, row[x], y, row[y]) for x, y in places} & missing), row))
        _, row = max(tries)
        missing -= {(x, row[x], y, row[y]) for x, y in places}
        settings = [factor[level] for factor, level in zip(factors, row, strict=True)]
        problems.append(Problem(**functools.reduce(dict.__or__, settings)))
    return problems


def problems() -> list[Problem]:
    """All problems of the check."""
    factors = list(FACTORS.values())
    return (
        pairwise([*factors, DECODE_BATCHES]) + pairwise([*factors, PREFILL_BATCHES])
        + SHARED + OTHERS + PAIRS
    )  # fmt: skip


def check(backends: list[str], out: Path | None = None) -> bool:
    """Check every problem with every backend in several processes; one JSON line each.

    Returns:
        Whether all passed. A problem that a backend declines is not counted.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # before anybody asks for the device
    jobs: list[Job] = [("poison", check_poison, ())]
    for kv_dtype, elements in LARGE_POOLS:
        name = f"{kv_dtype} pool of {elements} elements and more"
        jobs += [(name, check_large_pool, (backend, kv_dtype, elements)) for backend in backends]
    jobs += [("write", check_write, ("triton", *sizes)) for sizes in WRITES]
    for backend, problem in itertools.product(backends, problems()):
        jobs.append((problem.name, check_one, (backend, problem)))
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as threads:
        left = iter(jobs)  # each thread takes the next one
        running = [threads.submit(run_jobs, left, out) for _ in range(PROCESSES)]
        outcomes = [outcome for future in running for outcome in future.result()]
    passed = sum(outcome.get("passed") is True for outcome in outcomes)
    failed = sum(outcome.get("passed") is False for outcome in outcomes)
    print(f"CHECK: {passed} passed, {failed} failed, {len(outcomes) - passed - failed} declined")
    return failed == 0 and passed > 0


def run_jobs(jobs: Iterator[Job], out: Path | None = None) -> list[Figures]:
    """Record jobs run in a process of their own, and in a new one after each that broke it."""
    outcomes: list[Figures] = []
    spawn = multiprocessing.get_context("spawn")
    while True:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
            for name, function, args in jobs:
                broke = False
                try:
                    found = process.submit(function, *args).result()
                except (RuntimeError, ValueError) as error:  # a broken process, JAX's own errors
                    broke, text = True, (str(error) or repr(error))[:200]
                    backend = args[0] if args else "triton"
                    found = [
                        {"case": name, "implementation": backend, "passed": False, "error": text}
                    ]
                for figures in found:
                    rest = {key: x for key, x in figures.items() if key != "case"}
                    record("kernel_check", str(figures["case"]), out, **rest)
                outcomes += found
                if broke:
                    break
            else:
                return outcomes


def check_one(backend: str, problem: Problem) -> list[Figures]:
    """Figures of one backend; without `passed` if it declines the problem."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="jax")
    seed = secrets.randbits(31)
    case = make_case(problem, seed)
    figures = judge(backend, problem, case, case.pool, case.tables)
    return [{"case": problem.name, "implementation": backend, "seed": seed} | figures]


def make_case(problem: Problem, seed: int) -> dense_attention.Case:
    """Inputs with NaN in all slots that nobody owns; `tables` may hold `NO_BLOCK`."""
    kv_heads, group = problem.heads
    rows = (problem.rows,) * len(problem.lens) if isinstance(problem.rows, int) else problem.rows
    case = dense_attention.make_case(
        seed, problem.lens, rows=rows, kv_heads=kv_heads, group=group, head_dim=problem.head_dim,
        block_size=problem.block_size, dtype=jnp.dtype(problem.dtype),
        kv_dtype=None if problem.kv_dtype == problem.dtype else jnp.dtype(problem.kv_dtype),
        plain_keys=problem.plain_keys, extra_tokens=11 if problem.prefill else 0,
    )  # fmt: skip
    used = -(-case.seq_lens // problem.block_size)
    if problem.shared:
        columns = problem.shared // problem.block_size
        leader = int(np.argmax(case.seq_lens))
        case.tables[used > 0, :columns] = case.tables[leader, :columns]
    case.tables[np.arange(case.tables.shape[1])[None, :] >= used[:, None]] = NO_BLOCK
    return case


def judge(
    backend: str, problem: Problem, case: dense_attention.Case, pool: jax.Array, tables: Any
) -> Figures:
    """Run a case twice over a pool and compare with float64."""
    sinks = np.random.default_rng(case.seq_lens.sum()).normal(size=case.q.shape[1])
    options: dict[str, Any] = {"window": problem.window, "soft_cap": problem.soft_cap}
    options["sinks"] = sinks.astype(np.float32) if problem.sinks else None
    run = compile_call(backend, problem, case.kv_scales, options)
    q, lens = case.q, jnp.asarray(case.seq_lens)
    args = (q, pool, jnp.asarray(tables), lens, jnp.asarray(case.query_start))
    runs = []
    try:
        for _ in range(2):
            poison(q.nbytes)
            runs.append(run(*args))  # kept: the second run finds no old result in its memory
    except NotImplementedError as error:
        return {"declined": str(error)}
    (got, lse), again = ([np.asarray(x.astype(jnp.float32)) for x in pair] for pair in runs)
    want, want_lse = dense_attention.dense(case, **options)
    finite = np.isfinite(want_lse)
    exact = want_lse == -np.inf  # padding
    products = "float16" if problem.kv_dtype in ("float8_e4m3fn", "int8") else problem.dtype
    coarser = max(problem.dtype, products, key=lambda name: BOUNDS[name])
    largest, relative, lse_bound = BOUNDS[coarser]
    errors = {
        "max_error": float(np.abs(got - want).max()),
        "relative_error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "lse_error": float(np.abs(lse[finite] - want_lse[finite]).max()),
    }
    padding_zero = not got[exact].any() and bool((lse[exact] == -np.inf).all())
    bit_equal = bool((got == again[0]).all() and (lse == again[1]).all())
    bounds = (largest, relative, lse_bound)
    within = all(x <= bound for x, bound in zip(errors.values(), bounds, strict=True))  # no NaN
    passed = within and padding_zero and bit_equal
    return {"passed": passed, **errors, "padding_zero": padding_zero, "bit_equal": bit_equal}


def compile_call(
    backend: str, problem: Problem, kv_scales: jax.Array | None, options: dict[str, Any]
) -> Any:
    """The problem's call, jitted, with rows of all sequences under each other in the result."""
    sinks = options["sinks"]
    given = options | {
        "sinks": None if sinks is None else jnp.asarray(sinks), "kv_scales": kv_scales,
        "return_lse": True, "implementation": backend,
    }  # fmt: skip
    if problem.prefill:
        return jax.jit(functools.partial(pallas_kernels.paged_prefill_attention, **given))

    def decode(q: jax.Array, pool: jax.Array, tables: jax.Array, lens: jax.Array, _: Any) -> Any:
        shared = problem.shared // problem.block_size or None
        rows = q if problem.rows == 1 else q.reshape(-1, problem.rows, *q.shape[1:])
        out, lse = pallas_kernels.paged_decode_attention(
            rows, pool, tables, lens, shared_blocks=shared, **given
        )
        return out.reshape(q.shape), lse.reshape(q.shape[:-1])

    return jax.jit(decode)


def poison(size: int) -> None:
    """Fill freed device memory with NaN (of any dtype), for outputs of `size` bytes to lie in."""
    sizes = [64 << 20] + [size] * 8 + [size // 2, 1 << 16, 1 << 12, 1 << 8] * 4
    jax.block_until_ready([jax.device_put(np.full(n, 255, np.uint8)) for n in sizes])


def check_poison(interpret: bool = False) -> list[Figures]:
    """Whether a kernel that writes nothing finds NaN in its output: the poison works."""
    out = jax.ShapeDtypeStruct((500, 8, 128), jnp.bfloat16)
    idle = pl.pallas_call(
        lambda _: None, out_shape=out, interpret=interpret, compiler_params=plt.CompilerParams()
    )
    run = jax.jit(idle).lower().compile()
    found = []
    for _ in range(2):
        poison(500 * 8 * 128 * 2)
        found.append(run())
    held = all(np.isnan(np.asarray(x, np.float32)).all() for x in found)
    return [{"case": "poison", "implementation": "triton", "passed": bool(held)}]


def check_write(
    backend: Implementation, kv_heads: int, head_dim: int, kv_dtype: str
) -> list[Figures]:
    """Write into a pool of NaN; all bits of it but slot 0's must be those that XLA leaves."""
    rng = np.random.default_rng(secrets.randbits(31))
    k, v = (jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(2, 300, kv_heads, head_dim)))
    quantized = jnp.dtype(kv_dtype).itemsize == 1
    if not quantized:
        k, v = k.astype(kv_dtype), v.astype(kv_dtype)
    # Powers of two, which both divide by exactly.
    scales = jnp.full((2, kv_heads), 2.0**-5, jnp.float32) if quantized else None
    slots = np.where(rng.random(300) < 0.1, 0, 16 + rng.permutation(1000)[:300])
    pools = []
    for implementation in (backend, "xla"):
        empty = jnp.full((64, 2, kv_heads, 16, head_dim), 127 if kv_dtype == "int8" else jnp.nan)
        write = functools.partial(
            pallas_kernels.write_kv, kv_scales=scales, implementation=implementation
        )
        run = jax.jit(write, donate_argnums=0)
        pool = run(empty.astype(kv_dtype), k, v, jnp.asarray(slots, jnp.int32))
        pools.append(np.asarray(pool.astype(jnp.float32))[1:])
    equal = np.array_equal(*pools, equal_nan=True)
    name = f"write {kv_heads}x{head_dim} {kv_dtype}"
    return [{"case": name, "implementation": backend, "passed": equal}]


def check_large_pool(backend: str, kv_dtype: str, elements: int) -> list[Figures]:
    """Write and read at the end of a pool of more than `elements` elements, the rest of it NaN."""
    base = Problem(lens=(70, 0, 33), heads=(8, 4), kv_dtype=kv_dtype)
    seed = secrets.randbits(31)
    small = make_case(base, seed)
    first = elements // int(np.prod(small.pool.shape[1:])) + 1  # block that becomes small's block 0
    shape = (first + small.pool.shape[0], *small.pool.shape[1:])
    pool = jax.jit(lambda: jnp.full(shape, jnp.nan, kv_dtype))()
    k, v, slots = tokens_of(small, first)
    write = jax.jit(
        functools.partial(pallas_kernels.write_kv, kv_scales=small.kv_scales), donate_argnums=0
    )
    pool = write(pool, k, v, slots)
    outcomes = []
    for operation in ("decode", "prefill"):
        problem, case = base, small
        if operation == "prefill":
            problem = replace(base, prefill=True, rows=base.lens)
            case = replace(small, rows=small.seq_lens)
            q_shape = (sum(base.lens), *small.q.shape[1:])
            case.q = jnp.asarray(np.random.default_rng(seed).normal(size=q_shape), small.q.dtype)
        tables = np.where(case.tables == NO_BLOCK, NO_BLOCK, case.tables + first)
        name = f"{operation} at block {first} of a {kv_dtype} pool of {elements} elements and more"
        figures = judge(backend, problem, case, pool, tables)
        outcomes.append({"case": name, "implementation": backend, "seed": seed} | figures)
    return outcomes


def tokens_of(case: dense_attention.Case, first: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values `[tokens, kv_heads, head_dim]` of a case, and slots from block `first` on."""
    block_size = case.pool.shape[3]
    found, slots = [], []
    for s, length in enumerate(case.seq_lens):
        for position in range(length):
            block, offset = case.tables[s, position // block_size], position % block_size
            found.append(case.values[block, :, :, offset])
            slots.append((first + block) * block_size + offset)
    dtype = case.pool.dtype if case.pool.dtype.itemsize > 1 else jnp.float32
    both = jnp.asarray(np.stack(found), dtype)
    return both[:, 0], both[:, 1], jnp.asarray(slots, jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check one small problem per kernel.")
    parser.add_argument("--small", action="store_true", required=True)
    every = ",".join(f"{b}:{name}" for b in ("mosaic", "triton") for name in SMALL)
    every += ",triton:write"
    parser.add_argument("--kernels", default=every, help=f"of {every}")
    args = parser.parse_args()
    failed = False
    for kernel in args.kernels.split(","):
        backend, name = kernel.split(":")
        write = name == "write"
        (figures,) = check_write("triton", *WRITES[2]) if write else check_one(backend, SMALL[name])
        print(kernel, figures, flush=True)
        failed |= figures.get("passed") is False
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
