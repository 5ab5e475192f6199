"""Pools of two arrays, keys as they are and values in one byte, through every operation."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import TOLERANCE, dense, make_case, make_decode_case
from interpreted_triton import OPTIONS, triton_kernels

import pallas_kernels
from pallas_kernels import api
from pallas_kernels.interpret import lower_for_hopper
from pallas_kernels.mixed_batch import attend_mixed_batch
from pallas_kernels.shared_prefix import attend_shared_prefix
from pallas_kernels.write_kv_triton import write_kv as write_kv_triton

ONE_BYTE = [jnp.float8_e4m3fn, jnp.int8]
LENS, ROWS = [20, 0, 77, 140, 1], [20, 2, 1, 60, 1]  # a prompt, padding, a decode, a chunk

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")


def pair_case(seed, lens, kv_dtype, dtype=jnp.bfloat16, make=make_case, **shape):
    return make(seed, lens, dtype=dtype, kv_dtype=kv_dtype, plain_keys=True, **shape)


def check(got, case, tolerance=None, **options):
    """Weights are rounded to float16 by kernels, or not at all: the queries' dtype decides."""
    out, lse = got
    wanted, wanted_lse = dense(case, **options)
    tolerance = tolerance or TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(
        np.asarray(out, np.float64), wanted, rtol=tolerance, atol=2 * tolerance
    )
    np.testing.assert_allclose(np.asarray(lse, np.float64), wanted_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("implementation", "kv_dtype", "options"),
    [
        ("xla", jnp.float8_e4m3fn, {}),
        ("xla", jnp.int8, {"window": 33, "soft_cap": 2.0}),
        ("reference", jnp.float8_e4m3fn, {"window": 33, "soft_cap": 2.0}),
        ("reference", jnp.int8, {}),
    ],
)
def test_attention_equals_dense_attention(implementation, kv_dtype, options):
    """KE01, KE07: NaN in unused slots, and a scale of keys that nobody may look at."""
    how = {"implementation": implementation, "return_lse": True, **options}
    case = pair_case(1, [0, 1, 15, 16, 17, 300], kv_dtype, jnp.float32, make_decode_case)
    decode = jax.jit(functools.partial(pallas_kernels.paged_decode_attention, **how))
    check(decode(*case.args(), kv_scales=case.kv_scales), case, **options)
    case = pair_case(2, LENS, kv_dtype, jnp.float32, rows=ROWS)
    start = jnp.asarray(case.query_start)
    prefill = jax.jit(functools.partial(pallas_kernels.paged_prefill_attention, **how))
    check(prefill(*case.args(), start, kv_scales=case.kv_scales), case, **options)


@pytest.mark.parametrize(
    ("kv_dtype", "shape", "options"),
    [
        (jnp.float8_e4m3fn, {"group": 4}, {}),
        (jnp.int8, {"group": 7, "head_dim": 80}, {"window": 33}),
        (
            jnp.float8_e4m3fn,
            {"group": 1, "dtype": jnp.float16, "block_size": 32},
            {"soft_cap": 2.0},
        ),
        (jnp.int8, {"group": 3, "dtype": jnp.float32, "block_size": 128}, {}),
    ],
    ids=str,
)
def test_the_kernels_equal_dense_attention(kv_dtype, shape, options):
    """Decode and prefill, and both in a batch that is mixed."""
    prefill, decode = triton_kernels(rows=32, tile=16, workers=10)
    # values meet weights in float16, whatever the queries are
    tolerance = 3e-3 if shape.get("dtype") == jnp.float32 else None

    def how(case):
        scale = case.q.shape[-1] ** -0.5
        return OPTIONS | {"scale": scale, "kv_scales": case.kv_scales} | options

    case = pair_case(3, [100, 0, 33, 1, 16], kv_dtype, make=make_decode_case, **shape)
    check(jax.jit(lambda *a: decode(*a, **how(case)))(*case.args()), case, tolerance, **options)
    case = pair_case(4, LENS, kv_dtype, rows=ROWS, extra_tokens=3, **shape)
    batch = (*case.args(), jnp.asarray(case.query_start))
    check(jax.jit(lambda *a: prefill(*a, **how(case)))(*batch), case, tolerance, **options)
    mixed = jax.jit(lambda *a: attend_mixed_batch(prefill, decode, *a, **how(case)))
    check(mixed(*batch), case, tolerance, **options)


def test_a_shared_prefix_is_read_from_both_arrays():
    prefill, decode = triton_kernels(rows=32, tile=16, workers=10)
    case = pair_case(5, [200, 190, 0, 170], jnp.float8_e4m3fn, make=make_decode_case, group=2)
    tables = case.tables.copy()
    tables[case.seq_lens > 0, :10] = tables[0, :10]
    case.tables = tables
    # the blocks that the other sequences had there are not looked at any more
    options = OPTIONS | {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales}
    del options["window"]
    got = attend_shared_prefix(prefill, decode, *case.args(), jnp.int32(10), window=None, **options)
    check(got, case)


@pytest.mark.parametrize("implementation", ["xla", "reference", "triton"])
@pytest.mark.parametrize("kv_dtype", ONE_BYTE)
def test_each_array_gets_its_own_part_in_its_own_dtype(implementation, kv_dtype):
    """KE20: only the named slots change; a scale of keys is not looked at."""
    rng = np.random.default_rng(0)
    shape, dtype = (4, 1, 3, 16, 32), jnp.bfloat16
    keys = jnp.asarray(rng.normal(size=shape), dtype)
    values = jnp.asarray(rng.integers(-9, 9, shape), jnp.float32).astype(kv_dtype)
    k, v = (jnp.asarray(rng.normal(size=(5, 3, 32)), dtype) for _ in range(2))
    v = v.at[0, 0, 0].set(1e6)  # clamped
    slots = np.array([19, 40, 0, 63, 0], np.int32)
    scales = jnp.asarray([[np.nan] * 3, [2**-6, 2**-4, 2**-5]], jnp.float32)
    args = ((keys, values), k, v, jnp.asarray(slots), scales)
    if implementation == "triton":
        got = write_kv_triton(*args, interpret=True)
    else:
        got = pallas_kernels.write_kv(*args[:-1], kv_scales=scales, implementation=implementation)
    assert isinstance(got, tuple) and [x.dtype for x in got] == [dtype, kv_dtype]
    want_keys, want_values = (np.array(x.astype(jnp.float32)) for x in (keys, values))
    limit = 127.0 if kv_dtype == jnp.int8 else 448.0
    scaled = np.clip(
        np.asarray(v, np.float32) / np.asarray(scales)[1, None, :, None], -limit, limit
    )
    scaled = np.rint(scaled) if kv_dtype == jnp.int8 else jnp.asarray(scaled).astype(kv_dtype)
    for t, slot in enumerate(slots):
        want_keys[slot // 16, 0, :, slot % 16] = np.asarray(k[t], np.float32)
        want_values[slot // 16, 0, :, slot % 16] = np.asarray(scaled[t], np.float32)
    for x, wanted in zip(got, (want_keys, want_values), strict=True):
        x = np.asarray(x.astype(jnp.float32))
        np.testing.assert_array_equal(x[1:], wanted[1:])
        np.testing.assert_array_equal(x[0, :, :, 1:], wanted[0, :, :, 1:])


def structs(tokens, *, seqs=8, q_heads=32, kv_heads=8, head_dim=128, blocks=4096):
    """Queries, pool, new keys or values, tables, lengths and starts, of a large model's layer."""
    struct, shape = jax.ShapeDtypeStruct, (blocks, 1, kv_heads, 16, head_dim)
    return (
        struct((tokens, q_heads, head_dim), jnp.bfloat16),
        (struct(shape, jnp.bfloat16), struct(shape, jnp.float8_e4m3fn)),
        struct((tokens, kv_heads, head_dim), jnp.bfloat16),
        struct((seqs, 64), jnp.int32),
        struct((seqs,), jnp.int32),
        struct((seqs + 1,), jnp.int32),
    )


def test_a_donated_pair_is_updated_in_place():
    _, pool, new, *_ = structs(8)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    write = jax.jit(
        lambda *args: pallas_kernels.write_kv(*args, kv_scales=jnp.ones((2, 8))), donate_argnums=0
    )
    memory = write.lower(pool, new, new, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * 8 * 16 * 128 * (2 + 1)


def test_on_a_hopper_gpu_everything_goes_to_triton(monkeypatch):
    """Nothing but the form of the pool declines Mosaic here, and every kernel lowers."""
    monkeypatch.setattr(api, "_platform_implementations", lambda: ("mosaic", "triton", "xla"))
    scales = jnp.ones((2, 8))
    q, pool, new, tables, lens, start = structs(512)
    decode_q = jax.ShapeDtypeStruct((8, 32, 128), jnp.bfloat16)
    calls = {
        "paged_decode": (pallas_kernels.paged_decode_attention, (decode_q, pool, tables, lens)),
        "paged_prefill": (pallas_kernels.paged_prefill_attention, (q, pool, tables, lens, start)),
        "write_kv": (
            pallas_kernels.write_kv,
            (pool, new, new, jax.ShapeDtypeStruct((512,), jnp.int32)),
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer JAX: the backend is to go
        for name, (operation, args) in calls.items():
            text = lower_for_hopper(lambda *a, op=operation: op(*a, kv_scales=scales), *args)
            assert name in text and "mosaic_gpu" not in text
    assert "output_operand_alias" in text, "the last one writes in place"
    with pytest.raises(NotImplementedError, match="must be in one array, got a pair"):
        jax.eval_shape(
            lambda *a: pallas_kernels.paged_decode_attention(
                *a, kv_scales=scales, implementation="mosaic"
            ),
            decode_q, pool, tables, lens,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ((jnp.zeros((5, 2, 2, 16, 16)),) * 2, "must be a pair of .blocks, 1, kv_heads"),
        ((jnp.zeros((5, 1, 2, 16, 16)), jnp.zeros((6, 1, 2, 16, 16))), r"got \(5, .*, \(6, "),
        ((jnp.zeros((5, 1, 2, 16, 16)),), "must be a pair"),
        ((jnp.zeros((5, 1, 2, 16, 16)), jnp.zeros((5, 1, 2, 16, 16), jnp.bfloat16)),
         "must be float32 like q, float8_e4m3fn or int8, got bfloat16"),
        ((jnp.zeros((5, 1, 2, 16, 16)), jnp.zeros((5, 1, 2, 16, 16), jnp.int8)),
         "a pool of float32 and int8 needs kv_scales"),
    ],
)  # fmt: skip
def test_a_pair_that_does_not_fit_is_named(pool, message):
    tables, lens = jnp.zeros((3, 4), jnp.int32), jnp.zeros((3,), jnp.int32)
    with pytest.raises(ValueError, match=message):
        pallas_kernels.paged_decode_attention(jnp.zeros((3, 6, 16)), pool, tables, lens)
