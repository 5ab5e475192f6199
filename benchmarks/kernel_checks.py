"""Correctness of the decode kernels on the device at hand.

Every problem draws fresh random inputs, fills all unused slots with NaN, runs twice, and compares
with the float32 oracle.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import secrets
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

COMPILE_THREADS = 12
MAX_ERROR, MAX_RELATIVE = 2e-2, 5e-3  # bfloat16 outputs; relative in the 2-norm
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 500, 1024, 4000)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One shape with its options."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    block_size: int = 16
    kv_dtype: str = "bfloat16"
    lens: tuple[int, ...] = LENGTHS
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# Together they touch every branch of the kernels.
PROBLEMS = (
    Problem(),
    Problem(group=1, block_size=64),
    Problem(kv_heads=2, group=7, block_size=32, head_dim=64),
    Problem(kv_heads=3, group=3, head_dim=64),
    Problem(kv_heads=2, group=16, head_dim=256, block_size=128),
    Problem(kv_heads=1, group=32, options={"window": 100}),
    Problem(kv_heads=4, group=2, options={"soft_cap": 2.0, "window": 1000}),
    Problem(sinks=True, block_size=32),
    Problem(lens=(70_000, 3)),
    Problem(kv_heads=4, head_dim=80),
    Problem(kv_heads=4, group=8, kv_dtype="float8_e4m3fn"),
    Problem(kv_heads=4, group=1, head_dim=64, kv_dtype="int8"),
)


def check(backends: list[str]) -> bool:
    """Check every problem with every backend; print one line each, and whether all passed."""
    jobs = list(itertools.product(backends, PROBLEMS))
    with concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS) as threads:
        outcomes = list(threads.map(lambda job: check_one(*job), jobs))
    for (backend, problem), outcome in zip(jobs, outcomes, strict=True):
        print(backend, problem, outcome)
    passed = all(outcome["ok"] for outcome in outcomes)
    print("CHECK", "PASS" if passed else "FAIL", flush=True)
    return passed


def check_one(backend: str, problem: Problem) -> dict[str, Any]:
    """Errors of one backend; `ok` if they are within bounds or it declines the problem."""
    seed = secrets.randbits(32)
    q, args, options = inputs(problem, np.random.default_rng(seed))
    named = options | {"implementation": backend}
    run = jax.jit(lambda *a: pallas_kernels.paged_decode_attention(*a, **named))
    try:
        out, lse = run(q, *args)
    except NotImplementedError as error:
        return {"ok": True, "declined": str(error)}
    again, lse_again = run(q, *args)
    wanted, wanted_lse = oracle(q, args, options)
    real = np.asarray(args[2]) > 0
    out, again = (np.asarray(x, np.float64) for x in (out, again))
    largest = np.abs(out - wanted).max()  # NaN, and so not ok, if any output is
    relative = np.linalg.norm(out - wanted) / np.linalg.norm(wanted)
    lse_error = np.abs(np.asarray(lse)[real] - wanted_lse[real]).max()
    same = (out == again).all() and (np.asarray(lse) == np.asarray(lse_again)).all()
    ok = largest <= MAX_ERROR and relative <= MAX_RELATIVE and lse_error <= MAX_RELATIVE and same
    return {
        "ok": bool(ok), "max": float(f"{largest:.2e}"), "relative": float(f"{relative:.2e}"),
        "lse": float(f"{lse_error:.2e}"), "twice_equal": bool(same), "seed": seed,
    }  # fmt: skip


def inputs(problem: Problem, rng: np.random.Generator) -> tuple[Any, tuple[Any, ...], Any]:
    """Queries; pool, tables and lengths; options."""
    lens, size = np.asarray(problem.lens, np.int32), problem.block_size
    used = -(-lens // size)
    blocks = 2 + int(used.sum())  # the null block first, a block of garbage last
    tables = np.full((len(lens), int(used.max())), blocks - 1, np.int32)
    owned = np.zeros((blocks, size), bool)
    order = 1 + rng.permutation(blocks - 2)
    for seq, length in enumerate(lens):
        mine, order = order[: used[seq]], order[used[seq] :]
        tables[seq, : used[seq]] = mine
        owned[mine] = True
        if length % size:
            owned[mine[-1], length % size :] = False
    dtype = jnp.dtype(problem.kv_dtype)
    spread, garbage = (30.0, 127.0) if dtype == jnp.int8 else (1.0, np.nan)
    shape = (blocks, 2, problem.kv_heads, size, problem.head_dim)
    kv = rng.standard_normal(shape, np.float32) * spread
    pool = jnp.asarray(np.where(owned[:, None, None, :, None], kv, garbage)).astype(dtype)
    scales = rng.uniform(0.5, 1.5, (2, problem.kv_heads)) / spread
    q_shape = (len(lens), problem.kv_heads * problem.group, problem.head_dim)
    sinks = rng.standard_normal(q_shape[1])
    options = problem.options | {
        "sinks": jnp.asarray(sinks, jnp.float32) if problem.sinks else None,
        "kv_scales": jnp.asarray(scales, jnp.float32) if dtype.itemsize == 1 else None,
        "return_lse": True,
    }  # fmt: skip
    q = jnp.asarray(rng.standard_normal(q_shape), jnp.bfloat16)
    return q, (pool, jnp.asarray(tables), jnp.asarray(lens)), options


def oracle(q: jax.Array, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """The float32 reference, one sequence at a time to bound its memory."""
    pool, tables, lens = args
    named = options | {"implementation": "reference"}
    run = jax.jit(lambda *a: pallas_kernels.paged_decode_attention(*a, **named))
    wide = pool if pool.dtype.itemsize == 1 else pool.astype(jnp.float32)
    outs = []
    for seq, length in enumerate(np.asarray(lens)):
        columns = 1 << max(0, -(-int(length) // pool.shape[3]) - 1).bit_length()
        one = slice(seq, seq + 1)
        outs.append(run(q[one].astype(jnp.float32), wide, tables[one, :columns], lens[one]))
    return tuple(np.concatenate([np.asarray(x) for x in part]) for part in zip(*outs, strict=True))
