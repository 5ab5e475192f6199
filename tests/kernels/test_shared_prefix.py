"""Decoding over a prefix that all sequences share: the same numbers, read once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import TOLERANCE, dense, make_case
from interpreted_triton import OPTIONS, triton_kernels

import pallas_kernels
from pallas_kernels.interpret import lower_for_hopper, mosaic_interpreter
from pallas_kernels.shared_prefix import attend_shared_prefix, num_pieces

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

TRITON = triton_kernels(rows=16, tile=32, workers=6)


def make_shared_case(own_lens, *, prefix, rows=1, **shape):
    """Sequences of `prefix` positions in common and more of their own; own length None: padding."""
    lens = [0 if own is None else prefix + own for own in own_lens]
    case = make_case(3, lens, rows=[rows] * len(lens), **shape)
    block_size = case.pool.shape[3]
    leader = next(s for s, n in enumerate(lens) if n)
    for s, n in enumerate(lens):
        if n:
            case.tables[s, : prefix // block_size] = case.tables[leader, : prefix // block_size]
    if rows > 1:
        case.q = case.q.reshape(-1, rows, *case.q.shape[1:])
    return case


def check(got, case, **options):
    flat = case.q.reshape(-1, *case.q.shape[-2:])
    out, lse = got
    assert out.shape == case.q.shape and lse.shape == case.q.shape[:-1]
    assert out.dtype == case.q.dtype
    case.q = flat
    wanted, wanted_lse = dense(case, **options)
    atol = 2 * TOLERANCE[flat.dtype.name]
    np.testing.assert_allclose(np.asarray(out, np.float64).reshape(wanted.shape), wanted, atol=atol)
    np.testing.assert_allclose(np.asarray(lse).reshape(wanted_lse.shape), wanted_lse, atol=1e-3)


def compiled(case, **options):
    given = OPTIONS | {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales} | options
    return jax.jit(functools.partial(attend_shared_prefix, *TRITON, **given))


def run(case, shared, **options):
    return compiled(case, **options)(*case.args(), jnp.int32(shared))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"dtype": jnp.bfloat16, "block_size": 64, "group": 1}, {"soft_cap": 2.0}),
        ({"rows": 3, "group": 2}, {"sinks": jnp.linspace(-1.0, 1.0, 4)}),
        ({"dtype": jnp.bfloat16, "kv_dtype": jnp.float8_e4m3fn, "head_dim": 80}, {}),
        ({"dtype": jnp.float16, "kv_dtype": jnp.int8, "group": 7}, {}),
    ],
    ids=str,
)
def test_a_shared_prefix_gives_what_each_sequence_would_alone(shape, options):
    """KE01, KE04, KE07: NaN in unused slots, padding between, own parts that end at block edges."""
    case = make_shared_case([5, None, 64, 3, 70], prefix=320, **shape)
    check(run(case, 320 // case.pool.shape[3], **options), case, **options)


def test_any_part_of_the_prefix_may_be_promised():
    """Less than a tile of the prefill kernel, exactly one, and a rest that the decode reads."""
    case = make_shared_case([1, 40], prefix=320)
    call = compiled(case)
    for shared in (0, 7, 8, 16, 20):
        check(call(*case.args(), jnp.int32(shared)), case)


def test_a_table_too_narrow_for_a_tile_is_read_by_the_decode():
    case = make_shared_case([1, 20], prefix=32, extra_columns=0)
    check(run(case, 2), case)


def test_a_batch_of_padding_alone_is_zero():
    case = make_shared_case([None, None, 5], prefix=128)
    case.seq_lens = np.zeros_like(case.seq_lens)
    out, lse = run(case, 8)
    assert not np.asarray(out).any()
    assert np.isneginf(np.asarray(lse)).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_without_a_gpu_the_promise_changes_no_bit(implementation):
    case = make_shared_case([5, None, 64], prefix=160)
    plain = pallas_kernels.paged_decode_attention(*case.args(), implementation=implementation)
    shared = pallas_kernels.paged_decode_attention(
        *case.args(), shared_blocks=10, implementation=implementation
    )
    np.testing.assert_array_equal(plain, shared)


def test_pieces_fill_the_device():
    for rows, kv_heads in ((256, 8), (4, 8), (1024, 8), (64, 40), (2048, 40)):
        pieces = num_pieces(rows, kv_heads, 132)
        items = pieces * -(-rows // 128) * kv_heads
        rounds = -(-items // 132)
        assert items / (rounds * 132) > 0.9 or pieces == 1
    assert num_pieces(100_000, 8, 132) == 1


@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
@pytest.mark.parametrize(
    ("seqs", "heads", "dtype"),
    [(64, (32, 8), jnp.bfloat16), (16, (28, 4), jnp.bfloat16), (64, (32, 8), jnp.float8_e4m3fn)],
)
def test_real_shapes_lower_for_an_h200(implementation, seqs, heads, dtype):
    if implementation == "mosaic":
        try:
            mosaic_interpreter()
        except NotImplementedError as error:
            pytest.skip(str(error))
    scales = None if dtype == jnp.bfloat16 else jnp.ones((2, heads[1]))
    struct = jax.ShapeDtypeStruct

    def decode(q, pool, tables, lens, shared):
        return pallas_kernels.paged_decode_attention(
            q, pool, tables, lens, shared_blocks=shared, kv_scales=scales,
            implementation=implementation,
        )  # fmt: skip

    text = lower_for_hopper(
        decode,
        struct((seqs, heads[0], 128), jnp.bfloat16),
        struct((4096, 2, heads[1], 16, 128), dtype),
        struct((seqs, 2064), jnp.int32),
        struct((seqs,), jnp.int32),
        struct((), jnp.int32),
    )
    calls = {"triton": 3, "mosaic": 2}  # prefill and decode; Triton's merge is a kernel of its own
    assert text.count("custom_call @") >= calls[implementation]
