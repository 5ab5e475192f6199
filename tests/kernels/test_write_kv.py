"""Writing keys and values into the pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import api
from pallas_kernels.interpret import lower_for_hopper
from pallas_kernels.write_kv_triton import write_kv as write_kv_triton

IMPLEMENTATIONS = ["xla", "reference", "triton"]

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")


def write(implementation, pool, k, v, slots, kv_scales=None):
    if implementation == "triton":
        return write_kv_triton(pool, k, v, slots, kv_scales, interpret=True)
    return pallas_kernels.write_kv(
        pool, k, v, slots, kv_scales=kv_scales, implementation=implementation
    )


def random_kv(seed, tokens, kv_heads=2, head_dim=16, dtype=jnp.float32):
    x = np.random.default_rng(seed).normal(size=(2, tokens, kv_heads, head_dim))
    return jnp.asarray(x[0], dtype), jnp.asarray(x[1], dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_only_the_named_slots_change(implementation, dtype):
    """KE20: padding goes to slot 0, and the last slot of the pool keeps its content."""
    pool = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2, 2, 16, 16)), dtype)
    k, v = random_kv(1, 6, dtype=dtype)
    slots = np.array([19, 40, 0, 16, 0, 63], np.int32)
    wanted = np.array(pool, np.float32)
    for t, slot in enumerate(slots):
        wanted[slot // 16, 0, :, slot % 16] = np.asarray(k[t], np.float32)
        wanted[slot // 16, 1, :, slot % 16] = np.asarray(v[t], np.float32)
    got = write(implementation, pool, k, v, jnp.asarray(slots))
    got = np.asarray(got, np.float32)
    np.testing.assert_array_equal(got[1:], wanted[1:])
    np.testing.assert_array_equal(got[0, :, :, 1:], wanted[0, :, :, 1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "limit", "relative"), [(jnp.float8_e4m3fn, 448.0, 2**-4), (jnp.int8, 127.0, 2**-7)]
)
def test_a_quantized_pool_holds_scaled_and_clamped_values(implementation, dtype, limit, relative):
    pool = jnp.zeros((3, 2, 2, 16, 16), dtype)
    k, v = random_kv(2, 3)
    k = k.at[0, 0, 0].set(1e6)  # would be NaN in float8 without a clamp
    scales = jnp.asarray([[0.02, 0.05], [0.03, 0.04]], jnp.float32)
    got = write(implementation, pool, k, v, jnp.asarray([16, 17, 47], jnp.int32), scales)
    stored = np.asarray(got.astype(jnp.float32))
    back = stored * np.asarray(scales)[None, :, :, None, None]
    clamped = np.clip(np.asarray(k), -np.inf, limit * np.asarray(scales[0])[None, :, None])
    scale = np.asarray(scales)[:, :, None]
    for t, slot in enumerate([16, 17, 47]):
        wanted = np.stack([clamped[t], np.asarray(v)[t]])
        # Half a step: of the value's own exponent for a float, of the whole range for an integer.
        bound = relative * (np.abs(wanted) if dtype != jnp.int8 else 64 * scale)
        error = np.abs(back[slot // 16, :, :, slot % 16] - wanted)
        assert (error <= bound * 1.001 + 2.0**-10 * scale).all()
    assert stored[1, 0, 0, 0, 0] == limit


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int8])
def test_a_donated_pool_is_updated_in_place(dtype):
    pool = jax.ShapeDtypeStruct((4096, 2, 2, 16, 8), dtype)
    new = jax.ShapeDtypeStruct((8, 2, 8), jnp.float32 if dtype == jnp.int8 else dtype)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    scales = jnp.ones((2, 2), jnp.float32) if dtype == jnp.int8 else None

    def step(pool, k, v, slots):
        return pallas_kernels.write_kv(pool, k, v, slots, kv_scales=scales)

    memory = jax.jit(step, donate_argnums=0).lower(pool, new, new, slots).compile()
    memory = memory.memory_analysis()
    assert memory.alias_size_in_bytes == 4096 * 2 * 2 * 16 * 8 * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < 100_000


def test_a_block_past_two_to_the_31_elements_is_addressed_by_block():
    """KE05: a flat offset of block 131072 times 16384 elements would be 2**31 and wrap in int32."""
    pool = jax.ShapeDtypeStruct((131_073, 2, 4, 16, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((2, 4, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((2,), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda *a: pallas_kernels.write_kv(*a))(pool, new, new, slots)
    scatters = [e for e in jaxpr.jaxpr.eqns if "scatter" in e.primitive.name]
    assert len(scatters) == 1
    operand, index, _ = (v.aval for v in scatters[0].invars)
    assert operand.shape == pool.shape  # the pool is not flattened
    assert index.shape[-1] == 2  # block and offset


def test_blocks_beyond_int32_slots_are_refused():
    pool = jax.ShapeDtypeStruct((2**27 + 1, 2, 1, 16, 8), jnp.float32)
    new = jax.ShapeDtypeStruct((1, 1, 8), jnp.float32)
    slots = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match="int32"):
        jax.eval_shape(lambda *a: pallas_kernels.write_kv(*a), pool, new, new, slots)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 80), (12, 112), (40, 128)])
def test_the_kernel_writes_what_xla_writes(kv_heads, head_dim, kv_dtype):
    """KE10: heads and sizes that are no powers of two; rounding to the nearest, ties to even."""
    k, v = random_kv(3, 5, kv_heads, head_dim, jnp.bfloat16)
    scales = None if kv_dtype == jnp.bfloat16 else jnp.full((2, kv_heads), 2.0**-5)
    pool = jnp.zeros((4, 2, kv_heads, 32, head_dim), kv_dtype)
    slots = jnp.asarray([127, 32, 0, 77, 0], jnp.int32)
    got, wanted = (write(name, pool, k, v, slots, scales) for name in ("triton", "xla"))
    got, wanted = (np.asarray(x.astype(jnp.float32)) for x in (got, wanted))
    np.testing.assert_array_equal(got[1:], wanted[1:])


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (3, 80)])
def test_the_kernel_lowers_for_an_h200_and_aliases_the_pool(kv_heads, head_dim, kv_dtype):
    struct = jax.ShapeDtypeStruct
    scales = None if kv_dtype == jnp.bfloat16 else jnp.ones((2, kv_heads))
    text = lower_for_hopper(
        lambda *args: pallas_kernels.write_kv(*args, kv_scales=scales, implementation="triton"),
        struct((4096, 2, kv_heads, 16, head_dim), kv_dtype),
        struct((512, kv_heads, head_dim), jnp.bfloat16),
        struct((512, kv_heads, head_dim), jnp.bfloat16),
        struct((512,), jnp.int32),
    )
    assert "output_operand_alias" in text


def test_on_a_gpu_few_rows_are_left_to_xla_and_many_go_to_the_kernel(monkeypatch):
    monkeypatch.setattr(api, "_platform_implementations", lambda: ("mosaic", "triton", "xla"))
    struct = jax.ShapeDtypeStruct

    def uses_kernel(tokens, head_dim=64):
        arrays = [struct((tokens, 8, head_dim), jnp.bfloat16)] * 2
        pool = struct((64, 2, 8, 16, head_dim), jnp.bfloat16)
        slots = struct((tokens,), jnp.int32)
        return "pallas_call" in str(jax.make_jaxpr(pallas_kernels.write_kv)(pool, *arrays, slots))

    assert not uses_kernel(tokens=8)
    assert uses_kernel(tokens=32)
    assert not uses_kernel(tokens=32, head_dim=72)  # which the kernel declines
