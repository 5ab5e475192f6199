"""The Mosaic prefill kernel in JAX's interpreter, and lowered for an H200 at real shapes.

The interpreter runs the three warpgroups as threads with real barriers; a deadlock would hang and a
barrier left unobserved is an error. Cases are tiny: each takes seconds.
"""

import dataclasses

import dense_attention
import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_prefill_mosaic as mosaic
from pallas_kernels.interpret import lower_for_hopper, mosaic_interpreter
from pallas_kernels.tuning import MosaicPrefillConfig

pytestmark = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no Mosaic GPU interpreter"
)

SMALL = MosaicPrefillConfig(block_kv=64, thread_blocks=2)


def run(case, *, config=SMALL, **options):
    defaults = {"scale": case.q.shape[-1] ** -0.5, "kv_scales": case.kv_scales}
    defaults |= {"window": None, "soft_cap": None, "sinks": None, "return_lse": True}
    call = jax.jit(
        lambda *args: mosaic.paged_prefill_attention(
            *args, config=config, interpret=mosaic_interpreter(), **(defaults | options)
        )
    )
    return call(*case.args(), jnp.asarray(case.query_start))


def check(case, config=SMALL, **options):
    out, lse = run(case, config=config, **options)
    want, want_lse = dense_attention.dense(case, **options)
    # Probabilities and outputs are rounded to 8 or 11 bits; the lse is float32 throughout.
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want, atol=dense_attention.TOLERANCE[case.q.dtype.name]
    )
    np.testing.assert_allclose(np.asarray(lse, np.float64), want_lse, atol=2e-5)
    return out


def test_chunks_prompts_padding_and_single_tokens_in_one_call():
    # KE01, KE04, KE07, KE09: NaN in unused slots, rows of nobody, exact block edges, and queries
    # that are the last of a longer sequence. Tiles of two sequences overlap at rows 33 and 53.
    lens, rows = [100, 20, 0, 64, 17, 1], [33, 20, 3, 64, 1, 1]
    case = dense_attention.make_case(
        0, lens, rows=rows, kv_heads=1, group=2, dtype=jnp.bfloat16, extra_tokens=6
    )
    out = check(case)
    padding = np.r_[53:56, int(case.query_start[-1]) : case.q.shape[0]]
    assert not np.asarray(out[padding], np.float32).any()


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn, jnp.int8])
def test_window_and_sinks_over_many_tiles(kv_dtype):
    # KE14: the window counts the query itself. 70 positions: tiles masked on both sides, and whole.
    case = dense_attention.make_case(
        1, [290, 70], rows=[140, 70], kv_heads=1, group=2, dtype=jnp.bfloat16, kv_dtype=kv_dtype
    )
    check(case, window=170, sinks=jnp.asarray([0.5, -1.0]))


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn])
def test_soft_cap_with_a_group_of_seven_and_two_head_sections(kv_dtype):
    # KE12, KE16
    case = dense_attention.make_case(
        2, [140, 75], rows=[10, 75], kv_heads=2, group=7, dtype=jnp.float16, kv_dtype=kv_dtype
    )
    check(case, config=dataclasses.replace(SMALL, head_sections=2), soft_cap=1.5)


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn])
def test_rows_of_nobody_come_before_the_second_section_of_the_heads(kv_dtype):
    # Whole tiles of them, whose zeros must not be where queries of the second section already are.
    case = dense_attention.make_case(
        5, [150], rows=[150], kv_heads=2, group=1, dtype=jnp.bfloat16, kv_dtype=kv_dtype,
        extra_tokens=300,
    )  # fmt: skip
    config = dataclasses.replace(SMALL, head_sections=2, separate_output=False)
    out = check(case, config=config)
    assert not np.asarray(out[150:], np.float32).any()


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 16), (112, 64), (128, 128), (256, 16)])
def test_head_sizes_and_block_sizes(head_dim, block_size):
    # KE08, KE10, KE11: sizes that are no powers of two, lengths around the tiles'.
    case = dense_attention.make_case(
        3, [129, 65], rows=[127, 4], kv_heads=1, group=1, dtype=jnp.bfloat16,
        head_dim=head_dim, block_size=block_size,
    )  # fmt: skip
    check(case, config=dataclasses.replace(SMALL, separate_output=head_dim <= 128))


def test_without_causality_every_row_sees_whole_tiles_of_keys():
    case = dense_attention.make_case(
        5, [128, 64], rows=[3, 10], kv_heads=1, group=2, dtype=jnp.bfloat16
    )
    out, lse = run(case, causal=False)
    for s, rows in enumerate((slice(0, 3), slice(3, 13))):
        for row in range(rows.start, rows.stop):  # as the last row of a sequence of its own
            alone = dataclasses.replace(
                case, q=case.q[row : row + 1], tables=case.tables[s : s + 1],
                seq_lens=case.seq_lens[s : s + 1], rows=np.array([1], np.int32),
            )  # fmt: skip
            want, want_lse = dense_attention.dense(alone)
            np.testing.assert_allclose(np.asarray(out[row], np.float64), want[0], atol=1e-2)
            np.testing.assert_allclose(np.asarray(lse[row]), want_lse[0], atol=2e-5)


def test_one_thread_block_of_many_has_work():
    case = dense_attention.make_case(
        4, [30], rows=[7], kv_heads=1, group=1, dtype=jnp.bfloat16, extra_tokens=1
    )
    check(case, config=dataclasses.replace(SMALL, thread_blocks=5))


def test_the_register_shares_fit_what_a_thread_block_is_launched_with():
    # Otherwise the consumers wait for ever for registers, which no interpreter shows.
    launched = 65536 // (3 * 128) // 8 * 8
    for producer, consumer in (mosaic.COPYING_REGISTERS, mosaic.WIDENING_REGISTERS):
        assert producer + 2 * consumer <= 3 * launched


def test_unsupported_cases_are_declined_before_any_lowering():
    bf16, f32 = jnp.zeros((8, 2, 72), jnp.bfloat16), jnp.zeros((8, 2, 64), jnp.float32)
    for q, pool, words in (
        (bf16, jnp.zeros((4, 2, 2, 16, 72), jnp.bfloat16), "got 72"),
        (f32, jnp.zeros((4, 2, 2, 16, 64), jnp.float32), "got float32"),
        (bf16[..., :64], jnp.zeros((4, 2, 2, 8, 64), jnp.bfloat16), "got 8"),
        (jnp.zeros((8, 2, 80), jnp.bfloat16), jnp.zeros((4, 2, 2, 16, 80), jnp.int8), "got 80"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            mosaic.paged_prefill_attention(
                q, pool, jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32),
                jnp.zeros(2, jnp.int32), scale=1.0,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "seqs", "heads", "head_dim", "block_size", "kv_dtype", "options"),
    [
        (4096, 4, (32, 8), 128, 16, jnp.bfloat16, {"return_lse": True}),
        (32768, 1, (32, 8), 128, 16, jnp.bfloat16, {}),
        (2000, 16, (40, 40), 128, 16, jnp.bfloat16, {}),
        (512, 8, (28, 4), 64, 64, jnp.bfloat16, {"window": 4096, "soft_cap": 50.0}),
        (512, 8, (16, 8), 256, 128, jnp.bfloat16, {"return_lse": True}),
        (512, 8, (8, 2), 192, 32, jnp.bfloat16, {"return_lse": True}),
        (4096, 4, (32, 8), 128, 16, jnp.float8_e4m3fn, {"return_lse": True}),
        (4096, 4, (28, 4), 192, 16, jnp.int8, {"return_lse": True, "window": 1000}),
    ],
)
def test_real_shapes_lower_for_an_h200(
    tokens, seqs, heads, head_dim, block_size, kv_dtype, options
):
    struct = jax.ShapeDtypeStruct
    scales = None if kv_dtype == jnp.bfloat16 else jnp.ones((2, heads[1]))
    text = lower_for_hopper(
        lambda *args: mosaic.paged_prefill_attention(
            *args, scale=0.1, sinks=jnp.ones(heads[0]), kv_scales=scales, **options
        ),
        struct((tokens, heads[0], head_dim), jnp.bfloat16),
        struct((4096, 2, heads[1], block_size, head_dim), kv_dtype),
        struct((seqs, 64), jnp.int32),
        struct((seqs,), jnp.int32),
        struct((seqs + 1,), jnp.int32),
    )
    assert "mosaic_gpu" in text
