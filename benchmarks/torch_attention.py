"""The decode cases of `bench_kernels` through PyTorch, on contiguous keys and values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import record
from pallas_kernels.cases import DecodeCase


def time_sdpa(case: DecodeCase, l2_bytes: int, out: Path | None) -> None:
    """Record scaled_dot_product_attention, many calls in one CUDA graph, keys beyond the L2."""
    import torch

    rotations = int(np.clip(-(-4 * l2_bytes // case.kv_bytes), 1, 64))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    seqs, context = len(case.seq_lens), case.seq_lens[0]
    kv = torch.randn(rotations, 2, seqs, case.kv_heads, context, case.head_dim, **options)
    first = torch.randn(seqs, case.q_heads, 1, case.head_dim, **options)
    calls = max(rotations, 8)

    def chain() -> Any:
        q = first
        for i in range(calls):
            k, v = kv[i % rotations]
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return q

    seconds = graph_seconds(torch, chain) / calls
    record(
        "sdpa_decode", case.name, out, implementation="torch_sdpa",
        median_us=round(seconds * 1e6, 3), kv_bytes=case.kv_bytes,
        tb_per_s=round(case.kv_bytes / seconds / 1e12, 4), calls=calls, rotations=rotations,
    )  # fmt: skip


def graph_seconds(torch: Any, run: Callable[[], Any]) -> float:
    """Median seconds of a function replayed as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / 5)
    return statistics.median(times[1:])
