"""Blocks that have left the window are given up, and may hold NaN: nothing of it comes out."""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import TOLERANCE, dense, make_case, make_decode_case

import pallas_kernels
from pallas_kernels import paged_decode_triton, paged_prefill_mosaic, paged_prefill_triton
from pallas_kernels.interpret import mosaic_interpreter
from pallas_kernels.tuning import DecodeConfig, MosaicPrefillConfig, TritonPrefillConfig

OPTIONS = {"soft_cap": None, "sinks": None, "kv_scales": None, "return_lse": True}

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")


def given_up(case, window):
    """The same problem without the blocks that its queries do not see, which are full of NaN.

    Their places in the table name the first block that is left, as the block manager does it.
    """
    block_size = case.pool.shape[3]
    tables, gone = case.tables.copy(), [0]
    first = case.seq_lens - case.rows
    window = max(window, block_size + 1)
    for s, passed in enumerate(np.maximum(first - window + 1, 0) // block_size):
        gone += tables[s, :passed].tolist()
        tables[s, :passed] = tables[s, passed]
    assert len(gone) > 5
    pool = case.pool.at[np.array(gone)].set(jnp.asarray(jnp.nan, case.pool.dtype))
    return dataclasses.replace(case, tables=tables, pool=pool)


def check(op, case, window, *more):
    args = (*given_up(case, window).args(), *more)
    out, _ = jax.jit(lambda *a: op(*a, window=window))(*args)
    want, _ = dense(case, window=window)
    tolerance = TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want, rtol=tolerance, atol=2 * tolerance
    )


def options(case):
    return OPTIONS | {"scale": case.q.shape[-1] ** -0.5}


@pytest.mark.parametrize(
    ("implementation", "window"),
    [("xla", 1), ("xla", 16), ("xla", 40), ("xla", 65), ("reference", 1), ("reference", 40)],
)
def test_decode_and_prefill_without_kernels(implementation, window):
    case = make_decode_case(1, [300, 16, 0, 33, 150])
    named = {"implementation": implementation, "return_lse": True}
    check(lambda *a, **o: pallas_kernels.paged_decode_attention(*a, **named, **o), case, window)
    case = make_case(2, [300, 40, 0, 170], rows=[20, 40, 0, 1])
    start = jnp.asarray(case.query_start)
    op = pallas_kernels.paged_prefill_attention
    check(lambda *a, **o: op(*a, **named, **o), case, window, start)


@pytest.mark.parametrize("window", [1, 40])
def test_triton_decode(window):
    case = make_decode_case(1, [100, 0, 33, 200], dtype=jnp.bfloat16)
    config = DecodeConfig(tile=16, stages=2, workers=10)

    def op(*args, window):
        return paged_decode_triton.paged_decode_attention(
            *args, window=window, plan=None, config=config, interpret=True, **options(case)
        )

    check(op, case, window)


@pytest.mark.parametrize("window", [1, 40])
def test_triton_prefill(window):
    case = make_case(3, [150, 70], rows=[40, 1], dtype=jnp.bfloat16)
    config = TritonPrefillConfig(rows=32, block_kv=32)

    def op(*args, window):
        return paged_prefill_triton.paged_prefill_attention(
            *args, window=window, config=config, interpret=True, **options(case)
        )

    check(op, case, window, jnp.asarray(case.query_start))


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no Mosaic GPU interpreter"
)
def test_mosaic_prefill():
    case = make_case(4, [290], rows=[70], kv_heads=1, group=2, dtype=jnp.bfloat16)
    config = MosaicPrefillConfig(block_kv=64, thread_blocks=2)

    def op(*args, window):
        return paged_prefill_mosaic.paged_prefill_attention(
            *args, window=window, config=config, interpret=mosaic_interpreter(), **options(case)
        )

    check(op, case, 100, jnp.asarray(case.query_start))
