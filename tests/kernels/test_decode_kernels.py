"""The decode kernels in interpret mode against dense numpy, and their lowering for a Hopper GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import TOLERANCE, dense, make_case, make_decode_case

import pallas_kernels
from pallas_kernels import interpret
from pallas_kernels.decode_plan import plan_decode
from pallas_kernels.paged_decode_triton import paged_decode_attention as triton_decode
from pallas_kernels.tuning import DecodeConfig

OPTIONS = {
    "window": None, "soft_cap": None, "sinks": None, "kv_scales": None, "return_lse": True,
}  # fmt: skip
CONFIG = DecodeConfig(tile=16, stages=2, workers=10)

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")


def check(out, lse, case, **options):
    wanted, wanted_lse = dense(case, **options)
    tolerance = TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(
        np.asarray(out, np.float64), wanted, rtol=tolerance, atol=2 * tolerance
    )
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=1e-3, atol=1e-3)


def run_triton(case, config=CONFIG, plan=None, **options):
    options = OPTIONS | {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales} | options

    def call(*args):
        return triton_decode(*args, plan=plan, config=config, interpret=True, **options)

    return jax.jit(call)(*case.args())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"group": 4, "dtype": jnp.bfloat16}, {}),
        ({"group": 1, "block_size": 32, "dtype": jnp.float16}, {}),
        ({"group": 7, "head_dim": 80}, {"window": 33}),
        ({"group": 20, "kv_heads": 1, "head_dim": 32}, {"soft_cap": 2.0, "scale": 0.5}),
        ({"group": 3, "block_size": 128}, {"with_sinks": True, "window": 20}),
        ({"group": 4, "kv_dtype": jnp.float8_e4m3fn}, {"with_sinks": True}),
        ({"group": 2, "kv_dtype": jnp.int8}, {}),
    ],
    ids=str,
)
def test_triton_decode_equals_dense_attention(shape, options):
    """KE01, KE04, KE07, KE12: padding rows, block edges and NaN in every unused slot."""
    case = make_decode_case(1, [100, 0, 33, 1, 16], **shape)
    options = dict(options)
    if options.pop("with_sinks", False):
        options["sinks"] = jnp.linspace(-1.0, 1.0, case.q.shape[1]).astype(jnp.float32)
    out, lse = run_triton(case, **options)
    if case.kv_scales is None or case.q.dtype != jnp.float32:
        check(out, lse, case, **options)
    else:  # products of quantized keys are float16
        wanted, _ = dense(case, **options)
        np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=3e-3, atol=3e-3)


def test_the_number_of_workers_does_not_change_the_result():
    case = make_decode_case(2, [200, 16, 0, 90], group=2, kv_heads=1)
    for workers in (1, 3, 40):
        config = DecodeConfig(tile=16, stages=2, workers=workers)
        check(*run_triton(case, config), case)


def test_a_plan_from_the_host_gives_the_same_bits():
    case = make_decode_case(3, [200, 16, 0, 90], group=2)
    plan = plan_decode(case.seq_lens, tile=CONFIG.tile, parts=CONFIG.parts(2))
    for planned, traced in zip(
        run_triton(case, plan=jax.tree.map(jnp.asarray, plan)), run_triton(case), strict=True
    ):
        np.testing.assert_array_equal(planned, traced)


def test_triton_refuses_a_pool_whose_addresses_would_wrap():
    """KE05: 32-bit offsets of one-byte elements between 2**31 and 2**32."""
    pool = jax.ShapeDtypeStruct((140_000, 2, 8, 16, 64), jnp.int8)
    args = (
        jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16),
        pool,
        jax.ShapeDtypeStruct((2, 4), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    with pytest.raises(NotImplementedError, match="32 bits"):
        jax.eval_shape(lambda *a: triton_decode(*a, **(OPTIONS | {"scale": 1.0})), *args)


def mosaic_interpreter():
    try:
        return interpret.mosaic_interpreter()
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"group": 4, "dtype": jnp.bfloat16}, {"soft_cap": 3.0}),
        ({"group": 3, "dtype": jnp.float16, "block_size": 64}, {"window": 33}),
        ({"group": 1, "dtype": jnp.bfloat16, "block_size": 32}, {}),
        ({"group": 3, "kv_heads": 3, "dtype": jnp.bfloat16}, {"with_sinks": True}),
        ({"group": 8, "dtype": jnp.bfloat16, "block_size": 128}, {}),
        ({"head_dim": 128, "dtype": jnp.bfloat16, "kv_dtype": jnp.float8_e4m3fn}, {}),
    ],
    ids=str,
)
def test_mosaic_decode_equals_dense_attention(shape, options):
    from pallas_kernels.paged_decode_mosaic import paged_decode_attention

    interpreter = mosaic_interpreter()
    case = make_decode_case(4, [100, 0, 70, 1, 200], **shape)
    options = dict(options)
    if options.pop("with_sinks", False):
        options["sinks"] = jnp.linspace(-1.0, 1.0, case.q.shape[1]).astype(jnp.float32)
    given = OPTIONS | {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales} | options
    config = DecodeConfig(tile=64, stages=2, workers=6)
    out, lse = paged_decode_attention(*case.args(), config=config, interpret=interpreter, **given)
    check(out, lse, case, **options)


def test_mosaic_refuses_a_tile_of_bytes_whose_unused_slots_it_would_not_zero():
    from pallas_kernels.paged_decode_mosaic import paged_decode_attention

    mosaic_interpreter()  # older JAX does not come so far
    case = make_decode_case(4, [5], head_dim=128, dtype=jnp.bfloat16, kv_dtype=jnp.float8_e4m3fn)
    given = OPTIONS | {"scale": 1.0, "kv_scales": case.kv_scales}
    with pytest.raises(NotImplementedError, match="tile of at most 128, got 256"):
        paged_decode_attention(
            *case.args(), config=DecodeConfig(tile=256, stages=1, workers=6), **given
        )


@pytest.mark.parametrize(
    ("rows", "shape", "options"),
    [
        (3, {"group": 2, "dtype": jnp.bfloat16}, {"window": 20, "with_sinks": True}),
        (2, {"group": 1, "kv_heads": 3, "dtype": jnp.float16}, {}),
        (
            4,
            {"head_dim": 128, "dtype": jnp.bfloat16, "kv_dtype": jnp.float8_e4m3fn},
            {"soft_cap": 3.0},
        ),
    ],
    ids=str,
)
def test_mosaic_decode_of_several_queries_is_causal_among_them(rows, shape, options):
    """KE09: rows are the last positions of a sequence; those before its first are padding."""
    from pallas_kernels.paged_decode_mosaic import paged_decode_attention

    interpreter = mosaic_interpreter()
    lens = [100, 0, 33, 1, 66]
    case = make_case(5, lens, rows=[rows] * len(lens), **shape)
    options = dict(options)
    if options.pop("with_sinks", False):
        options["sinks"] = jnp.linspace(-1.0, 1.0, case.q.shape[1]).astype(jnp.float32)
    given = OPTIONS | {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales} | options
    q = case.q.reshape(-1, rows, *case.q.shape[1:])
    config = DecodeConfig(tile=64, stages=2, workers=6)
    out, lse = paged_decode_attention(
        q, *case.args()[1:], config=config, interpret=interpreter, **given
    )
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    check(out.reshape(case.q.shape), lse.reshape(-1, case.q.shape[1]), case, **options)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 3), (1, 7), (4, 1), (8, 4), (5, 5)])
def test_mosaic_loads_the_sinks_of_its_rows_from_an_even_place(kv_heads, group, queries):
    """Loads of two at once fault at odd places, which no interpreter shows."""
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from pallas_kernels.decode_mosaic_stages import Problem, columns_of
    from pallas_kernels.paged_decode_mosaic import _repeated

    q_heads, rows = kv_heads * group, queries * group
    problem = Problem(
        seqs=40, queries=queries, q_heads=q_heads, kv_heads=kv_heads, head_dim=64, block_size=16,
        tile=64, stages=2, scale=1.0, window=None, soft_cap=None, with_sinks=True,
        with_scales=False, with_lse=False,
    )  # fmt: skip
    repeated = np.asarray(_repeated(jnp.arange(q_heads)[None, :], problem))
    for row in range(0, problem.seqs * queries * q_heads, rows):
        first, head = row // 8 * 8, row // rows % kv_heads
        place = first % problem.row_period
        assert place % 8 == 0
        mine = repeated[place : place + columns_of(rows)][row - first : row - first + rows]
        np.testing.assert_array_equal(mine, np.tile(head * group + np.arange(group), queries))


SHAPES = {
    "Llama-3.1-8B": (32, 32, 8, 128, 16, jnp.bfloat16),
    "Llama-2-13B": (8, 40, 40, 128, 64, jnp.bfloat16),
    "Qwen2.5-7B": (128, 28, 4, 128, 32, jnp.float16),
    "MQA": (3, 16, 1, 256, 128, jnp.bfloat16),
    "fp8": (64, 32, 8, 128, 16, jnp.float8_e4m3fn),
    "odd": (1, 9, 3, 64, 16, jnp.bfloat16),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("implementation", ["triton", "mosaic"])
def test_decode_lowers_for_a_hopper_gpu_at_real_shapes(implementation, name):
    if implementation == "mosaic":
        mosaic_interpreter()  # older JAX lacks parts of the Mosaic GPU dialect, too
    seqs, q_heads, kv_heads, head_dim, block_size, dtype = SHAPES[name]
    quantized = jnp.dtype(dtype).itemsize == 1
    arrays = [
        jax.ShapeDtypeStruct((seqs, q_heads, head_dim), jnp.bfloat16 if quantized else dtype),
        jax.ShapeDtypeStruct((4096, 2, kv_heads, block_size, head_dim), dtype),
        jax.ShapeDtypeStruct((seqs, 64), jnp.int32),
        jax.ShapeDtypeStruct((seqs,), jnp.int32),
    ]

    def decode(*args):
        scales = jnp.ones((2, kv_heads), jnp.float32) if quantized else None
        return pallas_kernels.paged_decode_attention(
            *args, window=1000, kv_scales=scales, implementation=implementation
        )

    text = interpret.lower_for_hopper(decode, *arrays)
    calls = {"triton": 2, "mosaic": 1}  # Triton's merge is a kernel of its own
    assert text.count("custom_call @") == calls[implementation]


def test_queries_that_meet_widened_keys_are_laid_out_in_their_order():
    from pallas_kernels.mosaic_registers import KEY_ORDER, in_key_order

    q = jnp.arange(2 * 48).reshape(2, 48)
    places = np.concatenate([16 * i + np.array(KEY_ORDER) for i in range(3)])
    assert sorted(KEY_ORDER) == list(range(16))
    np.testing.assert_array_equal(in_key_order(q), np.asarray(q)[:, places])
