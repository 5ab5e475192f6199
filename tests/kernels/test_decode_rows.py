"""Decoding several tokens of each sequence at once, as when drafts are verified."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import TOLERANCE, dense, make_case

import pallas_kernels
from pallas_kernels.interpret import lower_for_hopper
from pallas_kernels.paged_decode_triton import paged_decode_attention as triton_decode
from pallas_kernels.tuning import DecodeConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

LENS = [100, 0, 33, 1, 16, 200, 3]  # padding, and sequences shorter than the rows asked for


def run(implementation, case, rows, **options):
    q = case.q.reshape(-1, rows, *case.q.shape[1:])
    options = {"return_lse": True, "kv_scales": case.kv_scales} | options
    decode = pallas_kernels.paged_decode_attention
    if implementation == "triton":
        config = DecodeConfig(tile=16, stages=2, workers=10)
        defaults = {"window": None, "soft_cap": None, "sinks": None}
        options = defaults | {"scale": q.shape[-1] ** -0.5} | options
        decode = functools.partial(triton_decode, config=config, interpret=True)
    else:
        options["implementation"] = implementation
    out, lse = jax.jit(functools.partial(decode, **options))(q, *case.args()[1:])
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:-1]
    return np.asarray(out, np.float64).reshape(case.q.shape), np.asarray(lse).reshape(
        -1, q.shape[2]
    )


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize(
    ("rows", "shape", "options"),
    [
        (1, {}, {}),
        (2, {"group": 7, "dtype": jnp.bfloat16}, {}),
        (3, {"block_size": 32, "head_dim": 96}, {"window": 20}),
        (4, {"dtype": jnp.float16}, {"window": 1, "soft_cap": 2.0}),
        (5, {"group": 1}, {"sinks": jnp.linspace(-1.0, 1.0, 2)}),
        (8, {"group": 4, "kv_heads": 1}, {"window": 33, "sinks": jnp.linspace(-1.0, 1.0, 4)}),
        (8, {"dtype": jnp.bfloat16, "kv_dtype": jnp.float8_e4m3fn}, {}),
    ],
    ids=str,
)
def test_rows_of_a_sequence_are_causal_and_equal_dense_attention(
    implementation, rows, shape, options
):
    """KE04, KE07, KE09, KE14: rows are the last positions, and none is before the first."""
    case = make_case(1, LENS, rows=[rows] * len(LENS), **shape)
    out, lse = run(implementation, case, rows, **options)
    wanted, wanted_lse = dense(case, **options)
    tolerance = TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(out, wanted, rtol=tolerance, atol=2 * tolerance)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    assert not out[np.isneginf(wanted_lse[:, 0])].any()


def test_rows_together_equal_one_decode_after_the_other():
    case = make_case(2, [40, 17, 50], rows=[4, 4, 4])
    out, _ = run("triton", case, 4)
    for row in (0, 2):
        alone = make_case(2, [40, 17, 50], rows=[4, 4, 4])
        alone.q = alone.q[row::4]
        alone.seq_lens = alone.seq_lens - (3 - row)
        single, _ = run("triton", alone, 1)
        np.testing.assert_allclose(out[row::4], single, rtol=1e-5, atol=1e-6)


def test_the_number_of_workers_does_not_change_the_rows():
    case = make_case(3, [120, 16, 50], rows=[8, 8, 8], group=2, kv_heads=1)
    q = case.q.reshape(3, 8, *case.q.shape[1:])
    outs = []
    for workers in (1, 7):
        config = DecodeConfig(tile=16, stages=2, workers=workers)
        out = triton_decode(
            q, *case.args()[1:], scale=0.1, window=30, soft_cap=None, sinks=None, kv_scales=None,
            return_lse=False, config=config, interpret=True,
        )  # fmt: skip
        outs.append(np.asarray(out))
    for other in outs[1:]:
        np.testing.assert_allclose(other, outs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "kv_dtype"),
    [
        (2, (32, 8), 128, jnp.bfloat16),
        (8, (28, 4), 128, jnp.float8_e4m3fn),
        (4, (40, 40), 80, jnp.bfloat16),
        (8, (32, 1), 96, jnp.int8),
        (1, (16, 4), 112, jnp.int8),
    ],
)
def test_real_shapes_lower_for_an_h200(rows, heads, head_dim, kv_dtype):
    """KE10: heads of 80, 96 and 112 columns."""
    struct = jax.ShapeDtypeStruct
    scales = None if kv_dtype == jnp.bfloat16 else jnp.ones((2, heads[1]))
    text = lower_for_hopper(
        functools.partial(
            pallas_kernels.paged_decode_attention, window=1000, kv_scales=scales,
            implementation="triton",
        ),
        struct((16, rows, heads[0], head_dim), jnp.bfloat16),
        struct((4096, 2, heads[1], 16, head_dim), kv_dtype),
        struct((16, 64), jnp.int32),
        struct((16,), jnp.int32),
    )  # fmt: skip
    assert text.count("custom_call") >= 2
