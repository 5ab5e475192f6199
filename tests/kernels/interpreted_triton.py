"""The Triton attention kernels in the interpreter, at sizes that it gets through."""

import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels import paged_decode_triton, paged_prefill_triton
from pallas_kernels.tuning import DecodeConfig, TritonPrefillConfig

# What the public operations fill in before they call a kernel.
OPTIONS = {
    "window": None, "soft_cap": None, "sinks": None, "kv_scales": None, "return_lse": True,
}  # fmt: skip


def triton_kernels(
    *, rows: int, tile: int, workers: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Prefill with tiles of `rows` queries, and decode by `workers` with tiles of `tile` keys."""
    prefill = functools.partial(
        paged_prefill_triton.paged_prefill_attention,
        config=TritonPrefillConfig(rows=rows, block_kv=32),
        interpret=True,
    )
    decode = functools.partial(
        paged_decode_triton.paged_decode_attention,
        config=DecodeConfig(tile=tile, stages=2, workers=workers),
        interpret=True,
    )
    return prefill, decode
