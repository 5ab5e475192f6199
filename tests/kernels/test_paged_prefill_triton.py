"""The Triton prefill kernel in Pallas' interpreter, and lowered for an H200 at real shapes."""

import warnings

import dense_attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_prefill_triton as triton
from pallas_kernels.interpret import lower_for_hopper
from pallas_kernels.tuning import TritonPrefillConfig

SMALL = TritonPrefillConfig(rows=32, block_kv=32)


def check(case, **options):
    defaults = {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales}
    defaults |= {"window": None, "soft_cap": None, "sinks": None, "return_lse": True}
    call = jax.jit(
        lambda *args: triton.paged_prefill_attention(
            *args, config=SMALL, interpret=True, **(defaults | options)
        )
    )
    out, lse = call(*case.args(), jnp.asarray(case.query_start))
    want, want_lse = dense_attention.dense(case, **options)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want, atol=dense_attention.TOLERANCE[case.q.dtype.name]
    )
    np.testing.assert_allclose(np.asarray(lse, np.float64), want_lse, atol=2e-5)
    return out


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_chunks_prompts_padding_and_single_tokens_in_one_call(dtype):
    # KE01, KE04, KE07, KE09: NaN in unused slots, rows of nobody, exact block edges, and queries
    # that are the last of a longer sequence.
    lens, rows = [100, 20, 0, 64, 17, 1], [33, 20, 3, 64, 1, 1]
    case = dense_attention.make_case(0, lens, rows=rows, dtype=dtype, extra_tokens=6)
    out = check(case)
    padding = np.r_[53:56, int(case.query_start[-1]) : case.q.shape[0]]
    assert not np.asarray(out[padding], np.float32).any()


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn, jnp.int8])
def test_window_soft_cap_and_sinks_with_a_group_of_seven(kv_dtype):
    # KE12, KE14, KE16
    case = dense_attention.make_case(
        1, [150, 70], rows=[90, 70], group=7, dtype=jnp.bfloat16, kv_dtype=kv_dtype
    )
    check(case, window=60, soft_cap=2.0, sinks=jnp.linspace(-1.0, 2.0, 14))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group"),
    [(80, 16, 1), (96, 32, 4), (112, 64, 2), (192, 128, 1), (256, 16, 3)],
)
def test_head_sizes_and_block_sizes(head_dim, block_size, group):
    # KE08, KE10, KE11
    case = dense_attention.make_case(
        2, [129, 65], rows=[9, 65], group=group, head_dim=head_dim, block_size=block_size,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    check(case)


def test_a_pool_that_32_bit_addresses_wrap_in_is_declined():
    # KE05: between 2**31 and 2**32 one-byte elements Triton's offsets overflow.
    struct = jax.ShapeDtypeStruct
    blocks = 2**31 // (2 * 8 * 16 * 128) + 1
    with pytest.raises(NotImplementedError, match="wrap"):
        jax.eval_shape(
            lambda *args: triton.paged_prefill_attention(
                *args, scale=1.0, window=None, soft_cap=None, sinks=None,
                kv_scales=jnp.ones((2, 8)), return_lse=False,
            ),
            struct((16, 32, 128), jnp.bfloat16),
            struct((blocks, 2, 8, 16, 128), jnp.float8_e4m3fn),
            struct((1, 4), jnp.int32),
            struct((1,), jnp.int32),
            struct((2,), jnp.int32),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "dtype", "kv_dtype"),
    [
        (4096, (32, 8), 128, jnp.bfloat16, jnp.bfloat16),
        (512, (28, 4), 192, jnp.float16, jnp.float16),
        (512, (8, 8), 112, jnp.bfloat16, jnp.float8_e4m3fn),
        (512, (16, 8), 256, jnp.bfloat16, jnp.int8),
        (256, (8, 2), 64, jnp.float32, jnp.float32),
    ],
)
def test_real_shapes_lower_for_an_h200(tokens, heads, head_dim, dtype, kv_dtype):
    struct = jax.ShapeDtypeStruct
    scales = None if dtype == kv_dtype else jnp.ones((2, heads[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer JAX: the backend is to go
        text = lower_for_hopper(
            lambda *args: triton.paged_prefill_attention(
                *args, scale=0.1, window=1000, soft_cap=30.0, sinks=jnp.ones(heads[0]),
                kv_scales=scales, return_lse=True,
            ),
            struct((tokens, heads[0], head_dim), dtype),
            struct((4096, 2, heads[1], 16, head_dim), kv_dtype),
            struct((4, 64), jnp.int32),
            struct((4,), jnp.int32),
            struct((5,), jnp.int32),
        )  # fmt: skip
    assert "triton" in text
