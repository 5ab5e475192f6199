"""Arithmetic of a model over whole requests, and the rate of matrix products to set it against."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.shapes import parameter_count
from benchmarks.workloads import RequestShape
from pagedjax.models import ArchConfig


def request_flops(arch: ArchConfig, shapes: Sequence[RequestShape]) -> int:
    """Operations that serving these requests once takes, a multiply-add counted as two.

    Two per weight and position, of the output projection only where a token is drawn; in
    attention, four per head dimension and pair of query and visible key. Norms, rotation and
    softmax are left out. No layer may have a sliding window.

    Raises:
        ValueError: a layer has one.
    """
    if any(arch.windows):
        raise ValueError(f"want full attention in every layer, got windows {arch.windows}")
    tables = arch.vocab * arch.embed * (1 if arch.tied else 2)
    per_position = 2 * (parameter_count(arch) - tables)
    per_sample = 2 * arch.vocab * arch.embed
    per_pair = 4 * arch.layers * arch.q_heads * arch.head_dim
    flops = 0
    for shape in shapes:
        # the last token is drawn and never fed
        positions = shape.prompt_len + shape.output_len - 1
        flops += positions * per_position + shape.output_len * per_sample
        flops += positions * (positions + 1) // 2 * per_pair
    return flops


def matmul_flops_per_s(size: int, dtype: str = "bfloat16") -> float:
    """Rate of a product of two random `size` x `size` matrices on the default device."""
    import jax

    from benchmarks.kernel_timing import median_seconds

    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    seconds, _ = median_seconds(jax.jit(lambda x, y: x @ y), (a, b), 1)
    return 2 * size**3 / seconds
