"""The public operations: semantics, argument checks, and the choice of an implementation.

Shapes are written with these names: `tokens` new tokens of a step, `seqs` rows of the block
table, `blocks` blocks of the pool, `max_blocks` width of the block table. The pool of one layer is
`[blocks, 2, kv_heads, block_size, head_dim]`: index 0 of axis 1 holds keys, index 1 values. Or it
is a pair of arrays `[blocks, 1, kv_heads, block_size, head_dim]`, keys and values, which may differ
in dtype. Block 0 is the null block: padding is written there and no sequence ever owns it. A slot
is `block * block_size + offset`.

Shapes and dtypes are checked when a call is traced. Values (blocks out of range, lengths beyond the
table) are checked only under `jax.enable_checks(True)` and outside of `jax.jit`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import reference, xla
from pallas_kernels.checks import (
    check_attention,
    check_int32,
    check_pool,
    check_scales,
    check_shape,
    check_shared_blocks,
    check_slot_mapping,
    check_values,
)
from pallas_kernels.mixed_batch import attend_mixed_batch
from pallas_kernels.pool_parts import Pool, arrays_of, is_quantized, parts_of
from pallas_kernels.shared_prefix import attend_shared_prefix
from pallas_kernels.tuning import WRITE_KERNEL_ROWS, fastest_decode_backend

Implementation = Literal["mosaic", "triton", "xla", "reference"]

KERNELS: tuple[Implementation, ...] = ("mosaic", "triton")
ATTENTION_IMPLEMENTATIONS: tuple[Implementation, ...] = ("mosaic", "triton", "xla", "reference")
WRITE_IMPLEMENTATIONS: tuple[Implementation, ...] = ("triton", "xla", "reference")

_Op = Callable[..., Any]
_IN_JAX: dict[str, Any] = {"xla": xla, "reference": reference}


def _lookup(operation: str, name: str) -> _Op:
    """The function that implements an attention operation, `decode` or `prefill`.

    A kernel is imported when it is needed: not everybody has a GPU.
    """
    function = f"paged_{operation}_attention"
    if name not in KERNELS:
        return getattr(_IN_JAX[name], function)
    kernel = getattr(importlib.import_module(f"pallas_kernels.paged_{operation}_{name}"), function)
    return functools.partial(_of_one_array, kernel) if name == "mosaic" else kernel


def _lookup_prefill(implementation: Implementation | None, name: str) -> _Op:
    """`_lookup` for `prefill`, where kernels leave sequences with a single row to one for decodes.

    Unless an implementation was asked for, that is whichever is the fastest, and need not be of the
    same backend.
    """
    prefill = _lookup("prefill", name)
    if name not in KERNELS:
        return prefill
    decode = functools.partial(_decode, KERNELS, implementation)
    return functools.partial(attend_mixed_batch, prefill, decode)


def _decode(
    names: Sequence[Implementation],
    implementation: Implementation | None,
    q: jax.Array,
    kv_pool: Pool,
    *args: Any,
    **options: Any,
) -> Any:
    """`first_that_can` of some implementations of a decode, the fastest one first."""
    fastest = fastest_decode_backend(q, parts_of(kv_pool).keys)
    order = sorted(names, key=lambda name: name != fastest)  # stable: the others as before
    lookup = functools.partial(_lookup, "decode")
    return first_that_can(lookup, order, implementation, q, kv_pool, *args, **options)


def _lookup_write(name: str) -> _Op:
    """The function that implements `write_kv`."""
    if name == "triton":
        return importlib.import_module("pallas_kernels.write_kv_triton").write_kv
    return _IN_JAX[name].write_kv


def _of_one_array(kernel: _Op, q: jax.Array, kv_pool: Pool, *args: Any, **options: Any) -> Any:
    """Run a kernel that reads keys and values from one array.

    Raises:
        NotImplementedError: the pool is a pair, or the kernel does not support the case.
    """
    if isinstance(kv_pool, tuple):
        raise NotImplementedError("keys and values must be in one array, got a pair")
    return kernel(q, kv_pool, *args, **options)


def write_kv(
    kv_pool: Pool,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_scales: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> Pool:
    """Write the keys and values of new tokens into their slots of the pool.

    In place when the caller donates `kv_pool` to the jitted function around it. Real slots must be
    distinct; any number of padding tokens may share slot 0, whose content is never read.

    Args:
        kv_pool: `[blocks, 2, kv_heads, block_size, head_dim]`, or a pair of
            `[blocks, 1, kv_heads, block_size, head_dim]`.
        k: `[tokens, kv_heads, head_dim]`, rotated; the pool's dtype unless the pool is quantized.
        v: like `k`.
        slot_mapping: int32 `[tokens]`, slots in `0 .. blocks * block_size - 1`; 0 for padding.
        kv_scales: float32 `[2, kv_heads]`, required for (and only for) an fp8 or int8 pool: the
            pool holds `k / kv_scales[0]` and `v / kv_scales[1]`, clamped to the dtype's range. If
            only one of a pair is quantized, the other one's row is not looked at.
        implementation: None for the default.

    Returns:
        The updated pool.

    Raises:
        ValueError: a shape or dtype does not fit; the text names got and wanted.
    """
    check_pool(kv_pool)
    _, _, kv_heads, _, head_dim = parts_of(kv_pool).keys.shape
    tokens = k.shape[0] if k.ndim else 0
    for name, x in (("k", k), ("v", v)):
        check_shape(name, x, (tokens, kv_heads, head_dim), "[tokens, kv_heads, head_dim]")
    check_slot_mapping(kv_pool, slot_mapping, tokens)
    check_scales(kv_pool, kv_scales)
    if k.dtype != v.dtype:
        raise ValueError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    for array in arrays_of(kv_pool):
        if not is_quantized(array.dtype) and k.dtype != array.dtype:
            raise ValueError(f"k and v must have the pool's dtype {array.dtype}, got {k.dtype}")
    order = list(WRITE_IMPLEMENTATIONS)
    if tokens * kv_heads < WRITE_KERNEL_ROWS:
        order.sort(key=lambda name: name == "triton")  # stable: Triton last
    return first_that_can(
        _lookup_write, order, implementation,
        kv_pool, k, v, slot_mapping, kv_scales,
    )  # fmt: skip


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    implementation: Literal["triton", "xla"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add to the residual stream, and normalise what it is then (arXiv:1910.07467).

    The mean square is float32; the sum is rounded to the dtype before it is normalised.

    Args:
        x: residual stream `[tokens, dim]`.
        delta: what a layer adds, `[pieces, tokens, dim]` of the dtype of `x` or float32: a sum
            that is still in pieces, as a product with a divided inner dimension leaves it.
        scale: `[dim]`, of the dtype of `x`.
        eps: added to the mean square.
        implementation: None for the kernel on GPUs and XLA elsewhere.

    Returns:
        `x` plus all of `delta`, and its normalisation times `scale`, both like `x`.

    Raises:
        ValueError: a shape or dtype does not fit; the text names got and wanted.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [tokens, dim], got {x.shape}")
    check_shape("delta", delta, (*delta.shape[:1], *x.shape), "[pieces, tokens, dim]")
    if not delta.shape[0]:
        raise ValueError(f"delta must have at least one piece, got {delta.shape}")
    check_shape("scale", scale, x.shape[1:], "[dim]")
    if scale.dtype != x.dtype or delta.dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            f"scale must have the dtype of x, {x.dtype}, and delta that or float32; "
            f"got {scale.dtype} and {delta.dtype}"
        )
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"{implementation=} is not one of triton, xla")
    in_xla = functools.partial(xla.add_rms_norm, eps=eps)
    if implementation == "xla" or (implementation is None and jax.default_backend() != "gpu"):
        return in_xla(x, delta, scale)
    module = importlib.import_module("pallas_kernels.add_rms_norm_triton")
    kernel = functools.partial(module.add_rms_norm, eps=eps)
    if implementation is None:  # arrays may be on the CPU of a machine that has a GPU
        return jax.lax.platform_dependent(x, delta, scale, cuda=kernel, default=in_xla)
    return kernel(x, delta, scale)


def paged_decode_attention(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    shared_blocks: jax.Array | int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Attention of the newest token, or few, of each sequence over its cached keys and values.

    The new tokens are the last of the `seq_lens[s]` positions, and causal among themselves; their
    own keys and values are in the cache already. Scores and softmax are float32. Whatever lies in
    unused slots, NaN included, never reaches the output, and table entries past the last used block
    are never followed.

    Args:
        q: `[seqs, q_heads, head_dim]`, or `[seqs, rows, q_heads, head_dim]` for equally many tokens
            of each sequence, such as drafts to verify; float32, bfloat16 or float16. `q_heads` is a
            multiple of `kv_heads`, and query head `h` reads key/value head
            `h // (q_heads / kv_heads)`. A row before a sequence's first position is padding.
        kv_pool: `[blocks, 2, kv_heads, block_size, head_dim]`, q's dtype, float8_e4m3fn or int8; or
            a pair of `[blocks, 1, kv_heads, block_size, head_dim]`, each in one of these dtypes.
        block_tables: int32 `[seqs, max_blocks]`, the blocks of each sequence in order.
        seq_lens: int32 `[seqs]`, at most `max_blocks * block_size`; 0 marks a padding row, whose
            output is exactly 0 (and whose lse is -inf).
        scale: factor on the scores; `head_dim ** -0.5` if None.
        window: a query sees only the latest `window` positions, itself included; all if None.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`, before masking.
        sinks: float32 `[q_heads]`, a logit per head that takes part in the softmax's denominator
            and has no value (arXiv:2309.17453).
        kv_scales: float32 `[2, kv_heads]`, required for (and only for) a quantized pool: keys are
            `pool * kv_scales[0]`, values `pool * kv_scales[1]`. If only one of a pair is quantized,
            the other one's row is not looked at.
        shared_blocks: a promise that so many leading columns of `block_tables` (an int32 scalar)
            are the same in every row that is not padding, and that all rows of `q` lie behind them.
            Kernels then read these blocks once, not once a sequence. It changes no result, and is
            of no use with a window.
        return_lse: also return the logarithm of the softmax's denominator (sink included).
        implementation: None takes the first of the platform's list that supports the case; a named
            one is used or fails.

    Returns:
        q's shape and dtype; with `return_lse` a pair of it and the natural log-sum-exp, float32,
        without the last axis.

    Raises:
        ValueError: a shape, dtype or option does not fit; the text names got and wanted.
        NotImplementedError: the named implementation does not support the case.
    """
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q must be [seqs, q_heads, head_dim] or [seqs, rows, q_heads, head_dim], got {q.shape}"
        )
    rows = q if q.ndim == 3 else q.reshape(-1, *q.shape[2:])
    check_attention(rows, kv_pool, block_tables, seq_lens, window, soft_cap, sinks, kv_scales)
    check_shape("q", q, (seq_lens.shape[0], *q.shape[1:]), "[seqs, ...]")
    shared = jnp.int32(shared_blocks) if isinstance(shared_blocks, int) else shared_blocks
    if shared is not None:
        check_shape("shared_blocks", shared, (), "a scalar")
        check_int32("shared_blocks", shared)
    check_values(kv_pool, block_tables, seq_lens)
    check_shared_blocks(q, kv_pool, block_tables, seq_lens, shared)
    decode = functools.partial(_decode, ATTENTION_IMPLEMENTATIONS, implementation)
    options = {
        "scale": _scale_or_default(scale, q), "window": window, "soft_cap": soft_cap,
        "sinks": sinks, "kv_scales": kv_scales, "return_lse": return_lse,
    }  # fmt: skip
    batch = (q, kv_pool, block_tables, seq_lens)
    if shared is not None and window is None and implementation in (None, *KERNELS):
        prefill = functools.partial(
            first_that_can, functools.partial(_lookup, "prefill"), KERNELS, implementation
        )
        try:
            return attend_shared_prefix(prefill, decode, *batch, shared, **options)
        except NotImplementedError:
            if implementation is not None:
                raise
    return decode(*batch, **options)


def paged_prefill_attention(
    q: jax.Array,
    kv_pool: Pool,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Causal attention of many sequences' new tokens, in one flat array, over their caches.

    Sequence `s` owns the rows `query_start[s] : query_start[s + 1]` of `q`: they are the last of
    its `seq_lens[s]` positions, and their own keys and values are in the cache already. Whole
    prompts, chunks, prefix hits and single decoded tokens differ only in how many rows they own.

    Args:
        q: `[tokens, q_heads, head_dim]`. Rows at or past `query_start[-1]` are padding: output 0.
        query_start: int32 `[seqs + 1]`, never decreasing, from 0 to at most `tokens`.
        kv_pool: see `paged_decode_attention`, as for all arguments not named here.
        block_tables: int32 `[seqs, max_blocks]`.
        seq_lens: int32 `[seqs]`, cached positions with the new tokens counted; at least the rows
            that the sequence owns, or 0 for padding, whose rows' output is 0.
        scale: as there.
        window: as there.
        soft_cap: as there.
        sinks: as there.
        kv_scales: as there.
        return_lse: as there.
        implementation: as there.

    Returns:
        `[tokens, q_heads, head_dim]` in q's dtype; with `return_lse` a pair of it and the natural
        log-sum-exp, float32 `[tokens, q_heads]`.

    Raises:
        ValueError: a shape, dtype or option does not fit; the text names got and wanted.
        NotImplementedError: the named implementation does not support the case.
    """
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, q_heads, head_dim], got {q.shape}")
    check_attention(q, kv_pool, block_tables, seq_lens, window, soft_cap, sinks, kv_scales)
    check_shape("query_start", query_start, (seq_lens.shape[0] + 1,), "[seqs + 1]")
    check_int32("query_start", query_start)
    check_values(kv_pool, block_tables, seq_lens, query_start)
    return first_that_can(
        functools.partial(_lookup_prefill, implementation), ATTENTION_IMPLEMENTATIONS,
        implementation, q, kv_pool, block_tables, seq_lens, query_start,
        scale=_scale_or_default(scale, q), window=window, soft_cap=soft_cap, sinks=sinks,
        kv_scales=kv_scales, return_lse=return_lse,
    )  # fmt: skip


def first_that_can(
    lookup: Callable[[str], _Op],
    supported: Sequence[Implementation],
    implementation: Implementation | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Run the named implementation, or the first default one that does not decline.

    Raises:
        ValueError: there is no implementation of that name.
        NotImplementedError: it, or each of the default ones, does not support the case.
    """
    if implementation is not None:
        if implementation not in supported:
            raise ValueError(f"{implementation=} is not one of {', '.join(supported)}")
        return lookup(implementation)(*args, **options)
    refusals: list[str] = []
    for name in supported:
        if name not in _platform_implementations():
            continue
        try:
            return lookup(name)(*args, **options)
        except NotImplementedError as error:
            refusals.append(f"{name}: {error}")
    raise NotImplementedError("no implementation supports the case; " + "; ".join(refusals))


def _platform_implementations() -> tuple[Implementation, ...]:
    """Implementations worth trying on the default device, in any order."""
    if jax.default_backend() != "gpu":
        return ("xla",)
    capability = float(getattr(jax.devices()[0], "compute_capability", "0.0"))
    return ("mosaic", "triton", "xla") if capability >= 9.0 else ("triton", "xla")


def _scale_or_default(scale: float | None, q: jax.Array) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
