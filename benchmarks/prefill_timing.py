"""Times of ragged paged prefill attention; see `bench_kernels`.

`median_us` is the median of `repeats` runs of 25 ms of back-to-back calls, after a pause of 0.1 s
each; `sustained_us` that of 5 runs of 0.15 s without a pause, when the GPU is at its power limit.
Every call reads other cache blocks than the call before, and all copies together exceed the L2
cache several times. `tflops` counts 4 * head_dim * q_heads * (visible query/key pairs): a causal
prompt counts half its square. `sdpa` is PyTorch's scaled_dot_product_attention with cuDNN on
contiguous keys, to calibrate by.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_timing import L2_BYTES, seconds_per_repeat
from benchmarks.record import record
from pallas_kernels import prefill_plan
from pallas_kernels.tuning import triton_prefill_config

Call = Callable[[int], Any]  # runs copy number i of the case

# Per sequence: new tokens, cached tokens before them.
CASES: dict[str, list[tuple[int, int]]] = {
    "1x4k": [(4096, 0)],
    "1x32k": [(32768, 0)],
    "2k_on_30k": [(2048, 30720)],
    "4x512_on_3.5k": [(512, 3584)] * 4,
    "8x1k": [(1024, 0)] * 8,
    "32x1k": [(1024, 0)] * 32,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A ragged batch and the shape of a model's attention."""

    seqs: list[tuple[int, int]]
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str

    @property
    def flops(self) -> int:
        pairs = sum(new * cached + new * (new + 1) // 2 for new, cached in self.seqs)
        return 4 * self.head_dim * self.q_heads * pairs

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array([new + cached for new, cached in self.seqs], np.int32)

    @property
    def query_start(self) -> np.ndarray:
        return np.cumsum([0] + [new for new, _ in self.seqs]).astype(np.int32)


def paged_calls(problem: Problem, backend: str, copies: int) -> Call:
    """Compile an implementation for a problem over `copies` sets of cache blocks."""
    lens, start = problem.seq_lens, problem.query_start
    per_seq = -(-lens // problem.block_size)
    blocks = int(per_seq.sum())
    order = np.random.default_rng(1).permutation(copies * blocks).astype(np.int32) + 1
    tables = np.zeros((copies, len(lens), int(per_seq.max())), np.int32)
    for c in range(copies):
        at = c * blocks
        for s, n in enumerate(per_seq):
            tables[c, s, :n], at = order[at : at + n], at + n
    keys = jax.random.split(jax.random.key(1), 2)
    pool_shape = (
        copies * blocks + 1, 2, problem.kv_heads, problem.block_size, problem.head_dim
    )  # fmt: skip
    pool = jax.random.normal(keys[0], pool_shape, jnp.bfloat16)
    kv_scales = None
    if problem.kv_dtype != "bfloat16":
        pool = (pool * 20 if problem.kv_dtype == "int8" else pool).astype(problem.kv_dtype)
        kv_scales = jnp.full((2, problem.kv_heads), 1.0, jnp.float32)
    q_shape = (int(start[-1]), problem.q_heads, problem.head_dim)
    q = jax.random.normal(keys[1], q_shape, jnp.bfloat16)

    module = importlib.import_module(f"pallas_kernels.paged_prefill_{backend}")
    if backend == "triton":
        config, alignment = triton_prefill_config(problem.head_dim, 2), 1
        tile_rows = module.tile_tokens(config, problem.q_heads // problem.kv_heads)
    else:
        tile_rows, alignment = module.TILE_ROWS, prefill_plan.ROW_ALIGNMENT
    plan = prefill_plan.plan_prefill(
        lens, start, tokens=q_shape[0], tile_rows=tile_rows, alignment=alignment
    )

    def attend(q: Any, pool: Any, table: Any, lens: Any, start: Any, plan: Any) -> Any:
        return module.paged_prefill_attention(
            q, pool, table, lens, start, scale=problem.head_dim**-0.5, window=None,
            soft_cap=None, sinks=None, kv_scales=kv_scales, return_lse=False, plan=plan,
        )  # fmt: skip

    rest = [jnp.asarray(x) for x in (lens, start, plan)]
    each = [jnp.asarray(table) for table in tables]
    compiled = jax.jit(attend).lower(q, pool, each[0], *rest).compile()
    return lambda i: compiled(q, pool, each[i % copies], *rest)


def sdpa_calls(problem: Problem, copies: int) -> tuple[Call, Callable[[Any], None]]:
    """cuDNN attention through PyTorch, for equal prompts without cached tokens."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    new, cached = problem.seqs[0]
    if cached or len(set(problem.seqs)) > 1:
        raise NotImplementedError("equal prompts without cached tokens only")
    heads = (problem.q_heads, problem.kv_heads, problem.kv_heads)
    shapes = [(len(problem.seqs), h, new, problem.head_dim) for h in heads]
    inputs = [
        [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes] for _ in range(copies)
    ]

    def call(i: int) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs[i % copies], is_causal=True, enable_gqa=True
            )

    return call, lambda _: torch.cuda.synchronize()


def bench_prefill(args: argparse.Namespace) -> None:
    """Time every case with every backend."""
    table = []
    for heads in args.heads.split(","):
        for name in args.prompts.split(","):
            for backend in args.backends.split(","):
                for kv_dtype in args.kv_dtypes.split(","):
                    try:
                        table.append(time_case(args, heads, name, backend, kv_dtype))
                    except NotImplementedError as error:
                        table.append(f"{name:14s} {backend:7s} {kv_dtype:14s} declined: {error}")
    print("\n".join(table))


def time_case(args: argparse.Namespace, heads: str, name: str, backend: str, kv_dtype: str) -> str:
    """Time one case and record its line; returns a row of the closing table."""
    q_heads, kv_heads, head_dim = (int(x) for x in heads.split(":"))
    block_size = int(args.block_sizes.split(",")[0])
    problem = Problem(
        seqs=CASES[name], q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
        block_size=block_size, kv_dtype=kv_dtype,
    )  # fmt: skip
    kv_bytes = int(problem.seq_lens.sum()) * 2 * kv_heads * head_dim
    kv_bytes *= 2 if kv_dtype == "bfloat16" else 1
    copies = min(16, max(2, -(-4 * L2_BYTES // kv_bytes)))
    if backend == "sdpa":
        call, wait = sdpa_calls(problem, copies)
    else:
        call, wait = paged_calls(problem, backend, copies), jax.block_until_ready
    bursts = seconds_per_repeat(
        call, wait, copies=copies, repeats=args.repeats, seconds=args.seconds, pause=0.1
    )
    busy = seconds_per_repeat(call, wait, copies=copies, repeats=6, seconds=0.15, pause=0.0)[1:]
    times = [t * 1e6 for t in bursts]
    median, sustained = statistics.median(times), statistics.median(busy) * 1e6
    tflops, sustained_tflops = (problem.flops / t / 1e6 for t in (median, sustained))
    record(
        "paged_prefill", name, args.out, implementation=backend, heads=heads,
        block_size=block_size, kv_dtype=kv_dtype, median_us=round(median, 2),
        min_us=round(min(times), 2), max_us=round(max(times), 2), repeats=args.repeats,
        tflops=round(tflops, 1), sustained_us=round(sustained, 2),
        sustained_tflops=round(sustained_tflops, 1),
    )  # fmt: skip
    return (
        f"{name:14s} {backend:7s} {kv_dtype:14s} {median:9.1f} us {tflops:6.1f} TFLOP/s, "
        f"sustained {sustained_tflops:6.1f}"
    )
