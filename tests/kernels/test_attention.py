"""Decode and prefill attention of the XLA implementation and the oracle against dense numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import TOLERANCE, dense, make_case, make_decode_case

import pallas_kernels

IMPLEMENTATIONS = ("xla", "reference")
EDGES = [0, 1, 15, 16, 17, 31, 32, 33, 48, 130, 300]  # around block and chunk edges (KE07)
QUANTIZED = [jnp.float8_e4m3fn, jnp.int8]

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def sinks_for(case):
    return jnp.asarray(np.random.default_rng(9).normal(size=case.q.shape[1]), jnp.float32)


def run(op, case, **options):
    args = case.args()
    if op is pallas_kernels.paged_prefill_attention:
        args = (*args, jnp.asarray(case.query_start))
    options |= {"kv_scales": case.kv_scales, "return_lse": True}
    return jax.jit(lambda *a: op(*a, **options))(*args)


def check(op, case, implementation, **options):
    out, lse = run(op, case, implementation=implementation, **options)
    wanted, wanted_lse = dense(case, **options)
    tolerance = TOLERANCE[case.q.dtype.name]
    assert out.dtype == case.q.dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float64), wanted, rtol=tolerance, atol=2 * tolerance
    )
    np.testing.assert_allclose(np.asarray(lse, np.float64), wanted_lse, rtol=1e-5, atol=1e-5)


def check_decode(case, implementation, **options):
    check(pallas_kernels.paged_decode_attention, case, implementation, **options)


def check_prefill(case, implementation, **options):
    check(pallas_kernels.paged_prefill_attention, case, implementation, **options)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decode_equals_dense_attention_at_every_block_edge(block_size, implementation):
    """KE07, KE01: the blocks after the last and every unused slot hold NaN."""
    check_decode(make_decode_case(1, EDGES, block_size=block_size), implementation)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(1, jnp.float32), (3, jnp.bfloat16), (7, jnp.bfloat16), (8, jnp.float16), (16, jnp.float32)],
)
def test_decode_serves_any_group_size_and_dtype(group, dtype, implementation):
    """KE12: 7 query heads per key head, too."""
    case = make_decode_case(2, [0, 5, 77, 256], group=group, dtype=dtype, kv_heads=2)
    check_decode(case, implementation)


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_any_head_dim_is_computed_in_full(head_dim, implementation):
    """KE10, KE11."""
    check_decode(make_decode_case(3, [3, 40], head_dim=head_dim), implementation)
    if head_dim in (8, 80, 256):
        case = make_case(3, [3, 40], rows=[3, 18], head_dim=head_dim)
        check_prefill(case, implementation)


def test_prefill_equals_dense_attention_for_mixed_rows(implementation):
    """KE08, KE09: whole prompts, chunks on a cached prefix, single rows, tile edges, padding."""
    lens = [1, 4, 63, 64, 65, 0, 129, 192, 37, 64, 130, 300, 50]
    rows = [1, 4, 63, 64, 65, 0, 129, 192, 1, 5, 16, 33, 32]
    check_prefill(make_case(4, lens, rows=rows, extra_tokens=7), implementation)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_prefill_serves_half_precision(dtype, implementation):
    check_prefill(make_case(5, [40, 70, 17], rows=[40, 20, 1], dtype=dtype), implementation)


@pytest.mark.parametrize(
    ("options", "with_sinks"),
    [
        ({"window": 1}, False),
        ({"window": 16}, True),
        ({"window": 100, "scale": 0.3}, False),
        ({"soft_cap": 0.7}, True),
        ({"soft_cap": 5.0, "window": 33, "scale": 1.0}, True),
    ],
    ids=str,
)
def test_options_compose(options, with_sinks, implementation):
    decode = make_decode_case(6, EDGES)
    prefill = make_case(7, [1, 40, 150, 0, 300], rows=[1, 40, 33, 0, 200], extra_tokens=1)
    if with_sinks:
        options = options | {"sinks": sinks_for(decode)}
    check_decode(decode, implementation, **options)
    check_prefill(prefill, implementation, **options)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_quantized_pool_is_read_through_its_scales(kv_dtype, implementation):
    check_decode(make_decode_case(8, EDGES, kv_dtype=kv_dtype), implementation)
    case = make_case(8, [20, 77, 140], rows=[20, 1, 60], kv_dtype=kv_dtype)
    check_prefill(case, implementation)


def test_a_window_counts_the_query_itself(implementation):
    """KE14: context 10, window 4, uniform scores, values one-hot by position."""
    case = make_decode_case(0, [10], kv_heads=1, group=1, head_dim=16, fill=0.0)
    values = np.zeros(case.pool.shape, np.float32)
    values[case.tables[0, 0], 1, 0, :, :] = np.eye(16)
    case.pool = jnp.asarray(values)
    (out, _) = run(
        pallas_kernels.paged_decode_attention, case, window=4, implementation=implementation
    )
    np.testing.assert_allclose(out[0, 0], [0.0] * 6 + [0.25] * 4 + [0.0] * 6, rtol=1e-6)


def test_the_soft_cap_applies_once_before_masking(implementation):
    """KE16: raw scores 200, 100 and -200 under a cap of 50."""
    case = make_decode_case(0, [3], kv_heads=1, group=1, head_dim=16, fill=np.nan)
    pool = np.full(case.pool.shape, np.nan, np.float32)
    pool[case.tables[0, 0], :, 0, :3] = 0.0
    pool[case.tables[0, 0], 0, 0, :3, 0] = [200.0, 100.0, -200.0]
    pool[case.tables[0, 0], 1, 0, :3, :3] = np.eye(3)
    case.pool, case.q = jnp.asarray(pool), jnp.zeros((1, 1, 16)).at[0, 0, 0].set(1.0)
    options = {"soft_cap": 50.0, "scale": 1.0, "implementation": implementation}
    out, _ = run(pallas_kernels.paged_decode_attention, case, **options)
    capped = 50.0 * np.tanh(np.array([4.0, 2.0, -4.0]))
    weights = np.exp(capped - capped.max())
    np.testing.assert_allclose(out[0, 0, :3], weights / weights.sum(), rtol=1e-4, atol=1e-30)


def test_garbage_in_unused_slots_changes_no_bit(implementation):
    """KE01: NaN, infinity and zero fill give the same bits."""
    outs = []
    for fill in (0.0, np.nan, np.inf):
        case = make_case(10, [3, 17, 32], rows=[1, 9, 1], fill=fill)
        outs.append(
            run(pallas_kernels.paged_prefill_attention, case, implementation=implementation)
        )
        case = make_decode_case(11, [3, 17, 32], fill=fill)
        outs.append(run(pallas_kernels.paged_decode_attention, case, implementation=implementation))
    for first, other in ((0, 2), (0, 4), (1, 3), (1, 5)):
        for a, b in zip(outs[first], outs[other], strict=True):
            np.testing.assert_array_equal(a, b)


def test_padding_rows_are_zero_and_leave_the_others_alone(implementation):
    """KE04: three real rows padded to eight with length 0 and a table of zeros."""
    case = make_decode_case(12, [5, 20, 33])
    alone, _ = run(pallas_kernels.paged_decode_attention, case, implementation=implementation)
    case.q = jnp.concatenate([case.q, jnp.ones_like(case.q[:1]).repeat(5, axis=0)])
    case.tables = np.pad(case.tables, ((0, 5), (0, 0)))
    case.seq_lens = np.pad(case.seq_lens, (0, 5))
    padded, lse = run(pallas_kernels.paged_decode_attention, case, implementation=implementation)
    np.testing.assert_array_equal(padded[:3], alone)
    np.testing.assert_array_equal(padded[3:], 0.0)
    np.testing.assert_array_equal(lse[3:], -np.inf)


def test_rows_of_a_sequence_without_length_are_zero(implementation):
    case = make_case(13, [20, 9], rows=[4, 6])
    case.seq_lens = np.array([20, 0], np.int32)
    out, _ = run(pallas_kernels.paged_prefill_attention, case, implementation=implementation)
    np.testing.assert_array_equal(out[4:], 0.0)


def test_each_row_equals_its_solo_run_in_any_order(implementation):
    """KE18: block tables of lengths 5, 20 and 33 in shuffled order."""
    case = make_decode_case(14, [5, 20, 33])
    together, _ = run(pallas_kernels.paged_decode_attention, case, implementation=implementation)
    for order in ([2, 0, 1], [1], [2], [0]):
        q, pool, tables, lens = case.args()
        index = jnp.asarray(order)
        out = pallas_kernels.paged_decode_attention(
            q[index], pool, tables[index], lens[index], implementation=implementation
        )
        np.testing.assert_allclose(out, together[index], rtol=2e-6, atol=2e-6)


def test_prefill_of_single_rows_equals_decode(implementation):
    case = make_decode_case(15, [1, 16, 100, 257])
    decode = run(pallas_kernels.paged_decode_attention, case, implementation=implementation)
    prefill = run(pallas_kernels.paged_prefill_attention, case, implementation=implementation)
    for a, b in zip(decode, prefill, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_the_same_call_twice_gives_the_same_bits(implementation):
    case = make_case(16, [100, 33, 1], rows=[50, 33, 1])
    first = run(pallas_kernels.paged_prefill_attention, case, implementation=implementation)
    again = run(pallas_kernels.paged_prefill_attention, case, implementation=implementation)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
