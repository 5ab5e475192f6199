"""Numbers of the prefill kernels on a GPU, against float64; see `bench_prefill --check`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import record
from pallas_kernels import paged_prefill_mosaic as mosaic
from pallas_kernels import paged_prefill_triton as triton
from tests.kernels import dense_attention

MAX_ERROR, RELATIVE_ERROR, LSE_ERROR = 2e-2, 5e-3, 2e-3
SINKS = np.linspace(-1.0, 2.0, 4, dtype=np.float32)
RAGGED = ([100, 20, 300, 0, 513, 1], [37, 20, 300, 2, 130, 1])  # positions, rows of a sequence

# name: (lengths, rows), shape, options
BATCHES: dict[str, tuple[tuple[list[int], list[int]], dict[str, Any], dict[str, Any]]] = {
    "ragged": (RAGGED, {}, {}),
    "ragged float16": (RAGGED, {"dtype": jnp.float16}, {}),
    "window, sinks": (RAGGED, {}, {"window": 100, "sinks": SINKS}),
    "soft cap, group 7": (RAGGED, {"group": 7}, {"soft_cap": 2.0}),
    "group 1, blocks of 128": (RAGGED, {"group": 1, "block_size": 128}, {"window": 250}),
    "fp8": (RAGGED, {"kv_dtype": jnp.float8_e4m3fn}, {}),
    "fp8, options, float16": (
        RAGGED,
        {"kv_dtype": jnp.float8_e4m3fn, "dtype": jnp.float16, "block_size": 32},
        {"window": 150, "sinks": SINKS, "soft_cap": 4.0},
    ),
    "int8, head 64": (RAGGED, {"kv_dtype": jnp.int8, "head_dim": 64}, {"window": 100}),
    "int8, head 192": (RAGGED, {"kv_dtype": jnp.int8, "head_dim": 192}, {}),
    "head 64": (RAGGED, {"head_dim": 64, "block_size": 64}, {}),
    "head 80": (RAGGED, {"head_dim": 80}, {"window": 70}),
    "head 96": (RAGGED, {"head_dim": 96, "block_size": 32}, {}),
    "head 112": (RAGGED, {"head_dim": 112}, {}),
    "head 192": (RAGGED, {"head_dim": 192, "block_size": 64}, {}),
    "head 256": (RAGGED, {"head_dim": 256}, {"sinks": SINKS}),
    "aligned prompts": (([512, 256, 1024], [512, 128, 128]), {}, {}),
}


def check_all(part: str, backends: list[str], out: Path | None) -> bool:
    """Check the batches whose name contains `part`; prints a line for each.

    Returns:
        Whether all pass.
    """
    names = [name for name in BATCHES if part in name]
    results = [check(name, backend, out) for name in names for backend in backends]
    print(f"{sum(results)} of {len(results)} pass")
    return all(results)


def check(name: str, backend: str, out: Path | None) -> bool:
    """Check one batch, with new random numbers at every call."""
    (lens, rows), shape, options = BATCHES[name]
    seed = time.time_ns() % 2**31
    case = dense_attention.make_case(
        seed, lens, rows=rows, extra_tokens=11,
        **({"dtype": jnp.bfloat16, "head_dim": 128, "group": 2} | shape),
    )  # fmt: skip
    module = mosaic if backend == "mosaic" else triton
    defaults = {"window": None, "soft_cap": None, "sinks": None, "kv_scales": case.kv_scales}
    call = jax.jit(
        lambda *args: module.paged_prefill_attention(
            *args, scale=case.q.shape[-1] ** -0.5, return_lse=True, **(defaults | options)
        )
    )
    args = (*case.args(), jnp.asarray(case.query_start))
    runs = []
    try:
        for _ in range(2):
            poison(case.q)
            runs.append([np.asarray(x.astype(jnp.float32)) for x in call(*args)])
    except NotImplementedError as error:
        record("check_prefill", name, out, implementation=backend, declined=str(error))
        return True
    (got, lse), again = runs
    want, want_lse = dense_attention.dense(case, **options)
    finite = np.isfinite(want_lse)
    figures = {
        "max_error": float(np.abs(got - want).max()),
        "relative_error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "lse_error": float(np.abs(lse[finite] - want_lse[finite]).max()),
        "padding_zero": not got[int(case.query_start[-1]) :].any() and bool((~finite).any()),
        "padding_lse": bool((lse[~finite] == -np.inf).all()),
        "bit_equal": bool((got == again[0]).all() and (lse == again[1]).all()),
    }
    passed = (
        figures["max_error"] <= MAX_ERROR
        and figures["relative_error"] <= RELATIVE_ERROR
        and figures["lse_error"] <= LSE_ERROR
        and figures["padding_zero"]
        and figures["padding_lse"]
        and figures["bit_equal"]
    )
    record("check_prefill", name, out, implementation=backend, passed=passed, seed=seed, **figures)
    return passed


def poison(like: jax.Array) -> None:
    """Fill memory of an output's size with NaN and free it, so that the next output lies in it."""
    jax.block_until_ready([jnp.full(like.shape, jnp.nan, like.dtype) for _ in range(8)])
