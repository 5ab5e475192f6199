"""Mixed batches of decodes and chunks: the share of the decode kernel, and the merge of both."""

import functools

import dense_attention
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_triton import OPTIONS, triton_kernels

import pallas_kernels
from pallas_kernels import api, prefill_plan, reference
from pallas_kernels.interpret import lower_for_hopper, mosaic_interpreter
from pallas_kernels.mixed_batch import attend_mixed_batch
from pallas_kernels.tuning import DecodeConfig, MosaicPrefillConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

# Single rows first, one of a sequence of length 1 and one of a padding sequence; then chunks, a
# padding sequence of three rows, one without any, a single row among the chunks, rows of nobody.
LENS, ROWS = [70, 1, 0, 33, 40, 0, 0, 64, 20], [1, 1, 1, 1, 35, 3, 0, 1, 20]
EXTRA = 6
TRITON = triton_kernels(rows=32, tile=16, workers=10)


def make_case(**shape):
    return dense_attention.make_case(0, LENS, rows=ROWS, extra_tokens=EXTRA, **shape)


def run(kernels, case, **options):
    given = OPTIONS | {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales} | options
    call = jax.jit(functools.partial(attend_mixed_batch, *kernels, **given))
    return call(*case.args(), jnp.asarray(case.query_start))


def check(got, case, **options):
    out, lse = (np.asarray(x, np.float64) for x in got)
    want, want_lse = dense_attention.dense(case, **options)
    atol = dense_attention.TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(out, want, atol=atol)
    np.testing.assert_allclose(lse, want_lse, atol=1e-3)
    assert not out[np.isneginf(want_lse[:, 0])].any()  # padding is exactly 0


def unwritten_singles(*batch, single_rows=True, **options):
    """The reference, with NaN where a kernel leaves the rows of `single_rows=False` unwritten."""
    out, lse = reference.paged_prefill_attention(*batch, **options)
    start = batch[-1]
    single = jnp.where(jnp.diff(start) == 1, start[:-1], out.shape[0])
    if single_rows:
        return out, lse
    return tuple(x.at[single].set(jnp.nan, mode="drop") for x in (out, lse))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3, "window": 9},
        {"soft_cap": 1.5, "sinks": jnp.linspace(-1.0, 2.0, 6, dtype=jnp.float32)},
    ],
    ids=["plain", "window and scale", "soft_cap and sinks"],
)
def test_every_row_comes_from_one_of_the_two_kernels(options):
    case = make_case()
    got = run((unwritten_singles, reference.paged_decode_attention), case, **options)
    check(got, case, **options)


def test_only_single_rows_have_a_context_in_the_decode_kernel():
    seen = []

    def decode(q, kv_pool, tables, lens, **options):
        seen.append((np.asarray(q), np.asarray(lens)))
        return reference.paged_decode_attention(q, kv_pool, tables, lens, **options)

    case = make_case()
    case.tables[np.asarray(LENS) == 0] = -1  # no sequence, no blocks
    attend_mixed_batch(
        unwritten_singles, decode, *case.args(), jnp.asarray(case.query_start),
        **(OPTIONS | {"scale": 1.0}),
    )  # fmt: skip
    ((q, lens),) = seen
    single = np.asarray(ROWS) == 1
    np.testing.assert_array_equal(lens, np.where(single, LENS, 0))
    np.testing.assert_array_equal(q[single], case.q[case.query_start[:-1][single]])


def test_what_the_decode_kernel_declines_stays_in_the_prefill_kernel():
    def declines(*args, **options):
        raise NotImplementedError("not this case")

    case = make_case()
    check(run((unwritten_singles, declines), case), case)


def test_one_sequence_is_left_to_the_prefill_kernel():
    def fails(*args, **options):
        raise AssertionError("one sequence is no mixed batch")

    case = dense_attention.make_case(0, [40], rows=[1], extra_tokens=3)
    check(run((unwritten_singles, fails), case), case)


@pytest.mark.parametrize("fastest", ["mosaic", "triton"])
@pytest.mark.parametrize(
    ("implementation", "declining", "decode"),
    [
        (None, "", "fastest"),
        (None, "fastest", "other"),
        ("mosaic", "", "mosaic"),
        ("triton", "", "triton"),
        ("mosaic", "mosaic", None),  # then the prefill kernel has all rows
    ],
)
def test_single_rows_go_to_the_fastest_kernel_unless_one_is_named(
    monkeypatch, fastest, implementation, declining, decode
):
    names = {"fastest": fastest, "other": "triton" if fastest == "mosaic" else "mosaic"}
    declining, decode = names.get(declining, declining), names.get(decode, decode)
    ran = []

    def kernel(operation, name):
        def run(*args, single_rows=True, **options):
            if (operation, name) == ("decode", declining):
                raise NotImplementedError
            ran.append((operation, name))
            if single_rows:
                return getattr(reference, f"paged_{operation}_attention")(*args, **options)
            return unwritten_singles(*args, single_rows=single_rows, **options)

        return run

    monkeypatch.setattr(api, "_lookup", kernel)
    monkeypatch.setattr(api, "_platform_implementations", lambda: ("mosaic", "triton", "xla"))
    monkeypatch.setattr(api, "fastest_decode_backend", lambda q, pool: fastest)
    case = make_case()
    args = (*case.args(), jnp.asarray(case.query_start))
    check(api.paged_prefill_attention(*args, return_lse=True, implementation=implementation), case)
    single = [] if decode is None else [("decode", decode)]
    assert ran == [*single, ("prefill", implementation or "mosaic")]


@pytest.mark.parametrize("alignment", [1, 8])
def test_single_rows_have_no_work_items_and_all_others_keep_theirs(alignment):
    # A row of padding past the last sequence is no decode, and must be written.
    lens, rows = np.asarray(LENS, np.int32), np.asarray(ROWS)
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    shape = {"tokens": int(start[-1]) + 1, "tile_rows": 16, "alignment": alignment}
    both = prefill_plan.plan_prefill(lens, start, **shape)
    chunks = prefill_plan.plan_prefill(lens, start, **shape, single_rows=False)
    traced = prefill_plan.plan_prefill_traced(
        jnp.asarray(lens), jnp.asarray(start), **shape, single_rows=False
    )
    np.testing.assert_array_equal(chunks, traced)
    used = [tuple(item) for item in both[: both[0, prefill_plan.COUNT], : prefill_plan.COUNT]]
    singles = set(start[:-1][rows == 1])
    wanted = [item for item in used if item[prefill_plan.LOW] not in singles]
    assert len(used) - len(wanted) == len(singles)
    assert chunks[0, prefill_plan.COUNT] == len(wanted)
    got = chunks[: len(wanted), : prefill_plan.COUNT]
    np.testing.assert_array_equal(got, np.asarray(wanted))


def test_a_batch_of_single_rows_alone_has_an_empty_work_list():
    start = np.arange(6, dtype=np.int32)
    plan = prefill_plan.plan_prefill(
        np.full(5, 9, np.int32), start, tokens=5, tile_rows=128, single_rows=False
    )
    assert not plan[:, prefill_plan.COUNT].any()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"dtype": jnp.float32}, {}),
        ({"dtype": jnp.float16, "group": 7}, {"window": 12, "soft_cap": 2.0}),
        (
            {"dtype": jnp.bfloat16, "kv_dtype": jnp.int8},
            {"sinks": jnp.linspace(-1.0, 2.0, 6, dtype=jnp.float32)},
        ),
    ],
    ids=["float32", "float16", "int8"],
)
def test_triton_attends_to_a_mixed_batch(shape, options):
    # KE01, KE04, KE07: NaN in unused slots, padding, and rows of two kernels next to each other.
    case = make_case(**shape)
    check(run(TRITON, case, **options), case, **options)


def mosaic_kernels(**prefill_config):
    try:
        interpreter = mosaic_interpreter()
    except NotImplementedError as error:
        pytest.skip(str(error))
    from pallas_kernels import paged_decode_mosaic, paged_prefill_mosaic

    config = MosaicPrefillConfig(block_kv=64, thread_blocks=2, **prefill_config)
    return (
        functools.partial(
            paged_prefill_mosaic.paged_prefill_attention, config=config, interpret=interpreter
        ),
        functools.partial(
            paged_decode_mosaic.paged_decode_attention,
            config=DecodeConfig(tile=64, stages=2, workers=4),
            interpret=interpreter,
        ),
    )


@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_prefill_kernel_can_leave_single_rows_unwritten(backend):
    # The interpreters fill the outputs with NaN beforehand.
    prefill, _ = TRITON if backend == "triton" else mosaic_kernels()
    case = make_case(kv_heads=1, group=2, dtype=jnp.bfloat16)
    options = OPTIONS | {"scale": 1.0, "return_lse": False, "single_rows": False}
    call = jax.jit(functools.partial(prefill, **options))
    out = np.asarray(call(*case.args(), jnp.asarray(case.query_start)), np.float32)
    unwritten = np.flatnonzero(np.isnan(out).any(axis=(1, 2)))
    np.testing.assert_array_equal(unwritten, case.query_start[:-1][np.asarray(ROWS) == 1])


def test_mosaic_attends_to_a_mixed_batch():
    case = make_case(kv_heads=1, group=2, dtype=jnp.bfloat16)
    options = {"window": 50, "sinks": jnp.asarray([0.5, -1.0], jnp.float32)}
    check(run(mosaic_kernels(), case, **options), case, **options)


def test_mosaic_runs_with_an_empty_work_list():
    # 128 rows are a whole tile, so that no row of padding is left for the prefill kernel.
    case = dense_attention.make_case(
        1, np.arange(128) % 20 + 1, rows=np.ones(128, int), kv_heads=2, group=1, dtype=jnp.bfloat16
    )
    check(run(mosaic_kernels(head_sections=2), case), case)


@pytest.mark.parametrize(
    ("implementation", "kv_dtype", "kernels"),
    [
        ("triton", jnp.bfloat16, 3),  # prefill, decode, and its merge
        ("triton", jnp.float8_e4m3fn, 3),
        ("mosaic", jnp.bfloat16, 2),  # its decode merges for itself
        ("mosaic", jnp.float8_e4m3fn, 2),
        ("mosaic", jnp.int8, 1),  # there is no decode kernel for it
    ],
)
def test_a_mixed_step_lowers_for_an_h200_at_a_real_shape(implementation, kv_dtype, kernels):
    if implementation == "mosaic":
        mosaic_kernels()  # older JAX lacks parts of the Mosaic GPU dialect, too
    tokens, seqs, q_heads, kv_heads, head_dim = 256 + 2048, 260, 32, 8, 128
    scales = None if kv_dtype == jnp.bfloat16 else jnp.ones((2, kv_heads))

    def attend(*args):
        return pallas_kernels.paged_prefill_attention(
            *args, window=4096, kv_scales=scales, return_lse=True, implementation=implementation
        )

    struct = jax.ShapeDtypeStruct
    text = lower_for_hopper(
        attend,
        struct((tokens, q_heads, head_dim), jnp.bfloat16),
        struct((4096, 2, kv_heads, 16, head_dim), kv_dtype),
        struct((seqs, 256), jnp.int32),
        struct((seqs,), jnp.int32),
        struct((seqs + 1,), jnp.int32),
    )
    calls = text.count("mosaic_gpu_v2") + text.count("__gpu$xla.gpu.triton")
    assert calls == kernels
    assert "stablehlo.while" not in text  # CUDA graphs do not capture a loop
