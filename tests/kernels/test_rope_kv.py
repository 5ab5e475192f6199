"""Rotation, normalisation and write in one kernel, against numpy in float64 and `write_kv`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import rope_kv_triton
from pallas_kernels.interpret import lower_for_hopper
from pallas_kernels.rope_kv_triton import rope_and_write_kv as kernel

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

EPS = 1e-3
# Relative and absolute, of numbers of about 1, or divided by scales of 0.02 to 0.05.
LAST_BITS = {"bfloat16": (2**-7, 2**-7), "float8_e4m3fn": (2**-3, 1.0), "int8": (0.0, 1.0)}


def numpy_heads(qkv, cos, sin, q_norm, k_norm):
    """Queries, keys and values in float64."""
    qkv, cos, sin = (np.asarray(x, np.float64) for x in (qkv, cos, sin))
    qkv = qkv.sum(axis=0)
    group, half = qkv.shape[2] - 2, qkv.shape[3] // 2

    def made(x, norm):
        if norm is not None:
            root = np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
            x = x / root * np.asarray(norm, np.float64)
        z = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    q = qkv[:, :, :group].reshape(len(qkv), -1, 2 * half)
    return made(q, q_norm), made(qkv[:, :, group], k_norm), qkv[:, :, group + 1]


def problem(seed, tokens, kv_heads, group, head_dim, *, norms, dtype=jnp.float32, pieces=1):
    rng = np.random.default_rng(seed)
    qkv = jnp.asarray(rng.normal(size=(pieces, tokens, kv_heads, group + 2, head_dim)), dtype)
    angles = rng.uniform(0, 7, (tokens, head_dim // 2))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    q_norm, k_norm = (
        jnp.asarray(rng.uniform(0.5, 1.5, head_dim), dtype) if norms else None for _ in range(2)
    )
    return qkv, cos, sin, {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}


def run(implementation, pool, qkv, cos, sin, slots, **options):
    if implementation == "triton":
        filled = {"key_mean": None, "kv_scales": None} | options
        means, scales = filled.pop("key_mean"), filled.pop("kv_scales")
        return kernel(pool, qkv, cos, sin, slots, means, scales, interpret=True, **filled)
    return pallas_kernels.rope_and_write_kv(
        pool, qkv, cos, sin, slots, implementation=implementation, **options
    )


@pytest.mark.parametrize("implementation", ["xla", "triton", None])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim"),
    [(5, 2, 4, 16), (1, 3, 1, 80), (4, 1, 7, 64), (12, 8, 1, 16)],
)
@pytest.mark.parametrize(("norms", "pieces"), [(False, 1), (True, 1), (True, 4), (False, 3)])
def test_heads_are_normalised_rotated_and_written(
    monkeypatch, implementation, tokens, kv_heads, group, head_dim, norms, pieces
):
    monkeypatch.setattr(rope_kv_triton, "PROGRAMS", 12)  # the last case has 8 heads in each
    sizes = (tokens, kv_heads, group, head_dim)
    qkv, cos, sin, how = problem(tokens, *sizes, norms=norms, pieces=pieces)
    blocks = 2 + tokens // 16 + 1
    pool = jnp.full((blocks, 2, kv_heads, 16, head_dim), jnp.nan, jnp.float32)
    slots = 16 + np.random.default_rng(0).permutation((blocks - 1) * 16)[:tokens].astype(np.int32)
    q, pool = run(implementation, pool, qkv, cos, sin, jnp.asarray(slots), dtype=jnp.float32, **how)
    want_q, want_k, want_v = numpy_heads(qkv, cos, sin, how["q_norm"], how["k_norm"])
    np.testing.assert_allclose(q, want_q, atol=1e-5)
    written = np.asarray(pool).transpose(0, 3, 1, 2, 4).reshape(blocks * 16, 2, kv_heads, head_dim)
    np.testing.assert_allclose(written[slots, 0], want_k, atol=1e-5)
    np.testing.assert_allclose(written[slots, 1], want_v, rtol=0, atol=1e-6 * (pieces - 1))
    assert np.isnan(np.delete(written, slots, axis=0)).all()


@pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, "pair"])
@pytest.mark.parametrize(
    ("qkv_dtype", "pieces"), [(jnp.bfloat16, 1), (jnp.float32, 1), (jnp.float32, 4)]
)
def test_the_kernel_writes_what_the_separate_operations_write(pool_dtype, qkv_dtype, pieces):
    """Up to the last bit: the interpreter rounds products of bfloat16 elsewhere than XLA."""
    tokens, kv_heads, head_dim = 6, 2, 32
    qkv, cos, sin, how = problem(1, tokens, kv_heads, 2, head_dim, norms=True, pieces=pieces)
    qkv = qkv.astype(qkv_dtype)
    shape = (3, 2, kv_heads, 16, head_dim)
    if pool_dtype == "pair":
        single = (3, 1, *shape[2:])
        pool = jnp.zeros(single, jnp.bfloat16), jnp.zeros(single, jnp.float8_e4m3fn)
    else:
        pool = jnp.zeros(shape, pool_dtype)
    how["dtype"] = jnp.bfloat16
    if pool_dtype != jnp.bfloat16:
        how["kv_scales"] = jnp.asarray([[0.02, 0.05], [0.03, 0.04]], jnp.float32)
    if pool_dtype in (jnp.float8_e4m3fn, jnp.int8):
        rng = np.random.default_rng(2)
        how["key_mean"] = jnp.asarray(rng.normal(size=(kv_heads, head_dim)), jnp.float32)
    slots = jnp.asarray([16, 0, 47, 20, 0, 31], jnp.int32)
    got_q, got_pool = run("triton", pool, qkv, cos, sin, slots, **how)
    want_q, want_pool = run("xla", pool, qkv, cos, sin, slots, **how)
    assert got_q.dtype == want_q.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        got_q.astype(jnp.float32), want_q.astype(jnp.float32), rtol=2**-7, atol=2**-7
    )
    for got, want in zip(jax.tree.leaves(got_pool), jax.tree.leaves(want_pool), strict=True):
        assert got.dtype == want.dtype
        rtol, atol = LAST_BITS[str(got.dtype)]
        got, want = (np.asarray(x[1:].astype(jnp.float32)) for x in (got, want))  # not padding
        assert np.count_nonzero(want)
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize(
    ("pieces", "tokens", "kv_heads", "group", "head_dim"),
    [(1, 1, 8, 4, 128), (1, 2048, 40, 1, 128), (4, 64, 8, 2, 128), (2, 16, 4, 7, 112)],
)
def test_it_compiles_for_a_gpu_at_real_shapes(
    pool_dtype, pieces, tokens, kv_heads, group, head_dim
):
    compressed = pool_dtype != jnp.bfloat16
    qkv = jax.ShapeDtypeStruct((pieces, tokens, kv_heads, group + 2, head_dim), jnp.float32)
    pool = jax.ShapeDtypeStruct((1000, 2, kv_heads, 16, head_dim), pool_dtype)
    angle = jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    scale = jax.ShapeDtypeStruct((head_dim,), jnp.bfloat16)
    mean = jax.ShapeDtypeStruct((kv_heads, head_dim), jnp.float32) if compressed else None
    scales = jax.ShapeDtypeStruct((2, kv_heads), jnp.float32) if compressed else None

    def call(pool, qkv, cos, sin, slots, mean, scales, q_norm, k_norm):
        return kernel(
            pool, qkv, cos, sin, slots, mean, scales, q_norm=q_norm, k_norm=k_norm, eps=EPS,
            dtype=jnp.bfloat16,
        )  # fmt: skip

    text = lower_for_hopper(call, pool, qkv, angle, angle, slots, mean, scales, scale, scale)
    assert "rope_and_write_kv" in text


def test_bad_arguments_are_refused_with_what_was_got_and_wanted():
    qkv, cos, sin, how = problem(0, 4, 2, 2, 16, norms=True)
    pool, slots = jnp.zeros((3, 2, 2, 16, 16)), jnp.arange(16, 20, dtype=jnp.int32)
    how["dtype"] = jnp.float32

    def refused(match, *, pool=pool, qkv=qkv, cos=cos, slots=slots, **changes):
        with pytest.raises(ValueError, match=match):
            pallas_kernels.rope_and_write_kv(pool, qkv, cos, sin, slots, **(how | changes))

    wanted = r"qkv must be \[pieces, tokens, 2, group \+ 2, 16\].*got "
    refused(wanted + r"\(1, 4, 2, 2, 16\)", qkv=qkv[:, :, :, :2])
    refused(wanted + r"\(4, 2, 4, 16\)", qkv=qkv[0])
    refused(wanted + r"\(0, 4, 2, 4, 16\)", qkv=qkv[:0])
    refused(r"cos.*\(4, 4\)", cos=cos[:, :4])
    refused("q_norm and k_norm go together", k_norm=None)
    refused("dtype must be the pool's float32, got bfloat16", dtype=jnp.bfloat16)
    refused("slot_mapping", slots=slots.astype(jnp.int16))
    refused("key_mean", key_mean=jnp.zeros((2, 8)))
    refused("implementation='cuda'", implementation="cuda")
