"""Argument checks, the choice of an implementation, and the memory promises of the XLA one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import make_case, make_decode_case

import pallas_kernels
from pallas_kernels import api


def decode_args(**changes):
    args = {
        "q": jnp.zeros((3, 6, 16)),
        "kv_pool": jnp.zeros((5, 2, 2, 16, 16)),
        "block_tables": jnp.zeros((3, 4), jnp.int32),
        "seq_lens": jnp.zeros((3,), jnp.int32),
    }
    return args | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((3, 6, 8))}, r"q must be \[..., q_heads, 16\].*got \(3, 6, 8\)"),
        ({"q": jnp.zeros((3, 16))}, r"q must be \[seqs, q_heads, head_dim\] or .*got \(3, 16\)"),
        ({"q": jnp.zeros((3, 2, 5, 16))}, r"multiple of kv_heads=2 heads, got 5"),
        ({"q": jnp.zeros((3, 5, 16))}, r"multiple of kv_heads=2 heads, got 5"),
        ({"q": jnp.zeros((2, 6, 16))}, r"q must be .* = \(3, 6, 16\), got \(2, 6, 16\)"),
        ({"q": jnp.zeros((3, 6, 16), jnp.int32)}, "q must be float32.*got int32"),
        ({"kv_pool": jnp.zeros((5, 3, 2, 16, 16))}, r"kv_pool must be .*got \(5, 3, 2, 16, 16\)"),
        ({"kv_pool": jnp.zeros((5, 2, 2, 16, 16), jnp.bfloat16)}, "kv_pool must be float32 like q"),
        ({"kv_pool": jnp.zeros((5, 2, 2, 16, 16), jnp.int8)}, r"needs kv_scales of shape \(2, 2\)"),
        ({"kv_scales": jnp.ones((2, 2))}, "kv_scales must be None"),
        ({"block_tables": jnp.zeros((3,), jnp.int32)}, r"block_tables must be .*got \(3,\)"),
        ({"block_tables": jnp.zeros((3, 4), jnp.int16)}, "block_tables must be int32, got int16"),
        ({"seq_lens": jnp.zeros((4,), jnp.int32)}, r"seq_lens must be .*\(3,\), got \(4,\)"),
        ({"seq_lens": jnp.zeros((3,), jnp.float32)}, "seq_lens must be int32, got float32"),
        ({"window": 0}, "window must be at least 1.*got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be positive, got 0"),
        ({"sinks": jnp.zeros((5,))}, r"sinks must be .*\(6,\), got \(5,\)"),
        ({"sinks": jnp.zeros((6,), jnp.bfloat16)}, "sinks must be float32, got bfloat16"),
        ({"shared_blocks": jnp.zeros((3,), jnp.int32)}, r"shared_blocks must be .*got \(3,\)"),
        ({"shared_blocks": jnp.float32(1.0)}, "shared_blocks must be int32, got float32"),
        ({"implementation": "cuda"}, "implementation='cuda' is not one of"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_wanted(changes, message):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_decode_attention(**decode_args(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tables": jnp.full((3, 4), 5, jnp.int32)}, r"blocks 0 \.\. 4, got 5 \.\. 5"),
        ({"block_tables": jnp.full((3, 4), -1, jnp.int32)}, r"blocks 0 \.\. 4, got -1 \.\. -1"),
        ({"seq_lens": jnp.full((3,), 65, jnp.int32)}, r"seq_lens must be in 0 \.\. 64, got 65"),
        ({"shared_blocks": 2}, r"shared_blocks=2 needs seq_lens of 0 or at least 33, got \[20"),
        ({"shared_blocks": -1}, "shared_blocks=-1"),
        (
            {"shared_blocks": 1, "block_tables": jnp.asarray([[1, 2, 0, 0]] * 2 + [[3, 2, 0, 0]])},
            "begin with 1 equal columns",
        ),
    ],
)
def test_values_out_of_range_are_named_when_checks_are_on(changes, message):
    args = decode_args(seq_lens=jnp.full((3,), 20, jnp.int32)) | changes
    with jax.enable_checks(True), pytest.raises(ValueError, match=message):
        pallas_kernels.paged_decode_attention(**args)


def test_unused_table_entries_may_hold_anything_when_checks_are_on():
    tables = jnp.full((3, 4), -1, jnp.int32).at[:, :2].set(1)
    args = decode_args(seq_lens=jnp.full((3,), 20, jnp.int32), block_tables=tables)
    with jax.enable_checks(True):
        out = pallas_kernels.paged_decode_attention(**args)
    assert out.shape == (3, 6, 16)


def test_prefill_checks_query_start():
    args = decode_args(q=jnp.zeros((7, 6, 16)))
    with pytest.raises(ValueError, match=r"query_start must be \[seqs \+ 1\] = \(4,\), got \(3,\)"):
        pallas_kernels.paged_prefill_attention(**args, query_start=jnp.zeros((3,), jnp.int32))
    start = jnp.asarray([0, 2, 1, 3], jnp.int32)
    with jax.enable_checks(True), pytest.raises(ValueError, match="query_start must rise by 0"):
        pallas_kernels.paged_prefill_attention(**args, query_start=start)
    args = decode_args(q=jnp.zeros((7, 1, 6, 16)))
    with pytest.raises(ValueError, match=r"q must be \[tokens, .*got \(7, 1, 6, 16\)"):
        pallas_kernels.paged_prefill_attention(**args, query_start=jnp.zeros((4,), jnp.int32))


def test_write_checks_dtype_and_shape():
    pool, slots = jnp.zeros((5, 2, 2, 16, 8)), jnp.zeros((3,), jnp.int32)
    k = jnp.zeros((3, 2, 8))
    with pytest.raises(ValueError, match=r"v must be .*\(3, 2, 8\), got \(3, 2, 4\)"):
        pallas_kernels.write_kv(pool, k, jnp.zeros((3, 2, 4)), slots)
    with pytest.raises(ValueError, match="pool's dtype float32, got float16"):
        pallas_kernels.write_kv(pool, k.astype(jnp.float16), k.astype(jnp.float16), slots)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([16, -1, 0], r"slot_mapping must be in 0 \.\. 79, got -1 \.\. 16"),
        ([16, 80, 0], r"slot_mapping must be in 0 \.\. 79, got 0 \.\. 80"),
        ([16, 16, 0], r"no slot but 0 twice, got \[16 16  0\]"),
    ],
)
def test_a_slot_that_cannot_be_written_is_named_when_checks_are_on(slots, message):
    """KE20: -1 would be the pool's last slot."""
    pool, k = jnp.zeros((5, 2, 2, 16, 8)), jnp.zeros((3, 2, 8))
    with jax.enable_checks(True), pytest.raises(ValueError, match=message):
        pallas_kernels.write_kv(pool, k, k, jnp.asarray(slots, jnp.int32))


def test_padding_slots_may_repeat_when_checks_are_on():
    pool, k = jnp.zeros((5, 2, 2, 16, 8)), jnp.ones((3, 2, 8))
    with jax.enable_checks(True):
        pool = pallas_kernels.write_kv(pool, k, k, jnp.asarray([0, 0, 79], jnp.int32))
    assert pool[4, :, :, 15].all()


def test_the_default_falls_through_and_a_named_one_fails_loudly(monkeypatch):
    def declines(*args, **kwargs):
        raise NotImplementedError("not this case")

    real = api._lookup

    def lookup(operation, name):
        return declines if name == "triton" else real(operation, name)

    monkeypatch.setattr(api, "_lookup", lookup)
    monkeypatch.setattr(api, "_platform_implementations", lambda: ("triton", "xla"))
    case = make_decode_case(0, [5])
    out = pallas_kernels.paged_decode_attention(*case.args())
    wanted = pallas_kernels.paged_decode_attention(*case.args(), implementation="xla")
    np.testing.assert_array_equal(out, wanted)
    with pytest.raises(NotImplementedError, match="not this case"):
        pallas_kernels.paged_decode_attention(*case.args(), implementation="triton")
    monkeypatch.setattr(api, "_platform_implementations", lambda: ("triton",))
    with pytest.raises(NotImplementedError, match="triton: not this case"):
        pallas_kernels.paged_decode_attention(*case.args())


def test_the_default_on_a_cpu_is_xla():
    assert api._platform_implementations() == ("xla",)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_temporary_memory_depends_neither_on_the_pool_nor_on_the_table(dtype):
    def temporary(op, blocks, columns, *more):
        shapes = [
            jax.ShapeDtypeStruct((4, 6, 32), dtype),
            jax.ShapeDtypeStruct((blocks, 2, 2, 16, 32), dtype),
            jax.ShapeDtypeStruct((4, columns), jnp.int32),
            jax.ShapeDtypeStruct((4,), jnp.int32),
            *more,
        ]
        return jax.jit(op).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    def decode(*args):
        return pallas_kernels.paged_decode_attention(*args)

    def prefill(*args):
        return pallas_kernels.paged_prefill_attention(*args)

    start = jax.ShapeDtypeStruct((5,), jnp.int32)
    for op, more in ((decode, ()), (prefill, (start,))):
        small = temporary(op, 100, 32, *more)
        assert temporary(op, 4000, 32, *more) == small
        assert temporary(op, 100, 3200, *more) - small <= 4 * 3200 * 4  # a copy of the table


def test_cost_follows_the_longest_context_not_the_table():
    """A table wide enough for a million tokens is no slower to build or run for short contexts."""
    case = make_case(0, [40, 33], rows=[40, 1], extra_columns=65_536)
    narrow = make_case(0, [40, 33], rows=[40, 1], extra_columns=8)
    start = jnp.asarray(case.query_start)
    out = pallas_kernels.paged_prefill_attention(*case.args(), start)
    wanted = pallas_kernels.paged_prefill_attention(*narrow.args(), start)
    np.testing.assert_array_equal(out, wanted)
