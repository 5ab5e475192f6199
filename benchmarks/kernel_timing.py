"""How the kernels are timed: many calls in one program, medians, the device's bandwidths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

L2_BYTES = 60 << 20


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


def seconds_per_repeat(
    call: Callable[[int], Any],
    wait: Callable[[Any], Any],
    *,
    copies: int,
    repeats: int,
    seconds: float,
    pause: float,
) -> list[float]:
    """Seconds per call, one figure per repeat of about `seconds`, after a pause each.

    Args:
        call: runs copy number i of a case and does not wait for it.
        wait: waits for what `call` returned.
        copies: different copies of the case.
        repeats: figures wanted.
        seconds: of calls per repeat.
        pause: seconds of rest before each.
    """
    once = 0.0
    for _ in range(2):  # the second pass is warm
        begin = time.perf_counter()
        wait([call(i) for i in range(copies)])
        once = (time.perf_counter() - begin) / copies
    calls = max(copies, int(seconds / once))
    times = []
    for _ in range(repeats):
        time.sleep(pause)
        begin = time.perf_counter()
        out = None
        for i in range(calls):
            out = call(i)
        wait(out)
        times.append((time.perf_counter() - begin) / calls)
    return times


def copy_bandwidth() -> float:
    """Bytes per second that a device copy moves, read and written counted."""
    x = jnp.ones((1 << 30,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    seconds, _ = median_seconds(copy, (x,), 1)
    return 2 * x.nbytes / seconds


def read_bandwidth() -> float:
    """Bytes per second at which a device reads an array from end to end.

    What a decode kernel can come up to, which writes next to nothing: a copy writes as much as it
    reads, and memory takes time to turn around.
    """
    x = jax.random.bits(jax.random.key(0), (1 << 18, 8192), jnp.uint16)
    largest_of_rows = jax.jit(lambda x: jnp.max(x, axis=1))
    seconds, _ = median_seconds(largest_of_rows, (x,), 1)
    return x.nbytes / seconds


def random_pool(
    blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: str
) -> jax.Array:
    """A pool of random numbers; large ones repeat a piece of 256 MiB."""
    shape = (2, kv_heads, block_size, head_dim)
    piece = min(blocks, (128 << 20) // int(np.prod(shape)))

    @jax.jit
    def fill() -> jax.Array:
        x = jax.random.normal(jax.random.key(0), (piece, *shape), jnp.bfloat16).astype(dtype)
        return jnp.tile(x, (-(-blocks // piece), 1, 1, 1, 1))

    return jax.block_until_ready(fill())
