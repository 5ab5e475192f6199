"""Residual addition with normalisation, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm
from pallas_kernels import add_rms_norm_triton as kernel
from pallas_kernels.interpret import lower_for_hopper

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton.*:DeprecationWarning")

EPS = 1e-5


def inputs(rows, dim, dtype, seed=0, pieces=1):
    rng = np.random.default_rng(seed)
    shapes = ((rows, dim), (pieces, rows, dim), (dim,))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def interpreted(x, delta, scale):
    return kernel.add_rms_norm(x, delta, scale, EPS, True)


def in_xla(x, delta, scale):
    return add_rms_norm(x, delta, scale, eps=EPS, implementation="xla")


@pytest.mark.parametrize("run", [interpreted, in_xla])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1024), (3, 576), (5, 64), (2, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_sum_is_what_is_normalised(run, rows, dim, dtype):
    x, delta, scale = inputs(rows, dim, dtype)
    total, normed = run(x, delta, scale)
    wanted = np.asarray(x + delta[0]).astype(np.float64)
    assert total.dtype == normed.dtype == dtype
    assert (np.asarray(total).astype(np.float64) == wanted).all()
    mean_square = (wanted**2).mean(axis=1, keepdims=True)
    wanted = wanted / np.sqrt(mean_square + EPS) * np.asarray(scale).astype(np.float64)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    assert np.allclose(np.asarray(normed).astype(np.float64), wanted, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("run", [interpreted, in_xla])
def test_what_is_added_may_be_wider_and_is_not_rounded_before(run):
    x, _, scale = inputs(3, 64, jnp.bfloat16)
    delta = jnp.full((3, 64), 2.0**-10, jnp.float32) * x.astype(jnp.float32) + 0.3
    total, normed = run(x, delta[None], scale)
    assert total.dtype == normed.dtype == jnp.bfloat16
    exact = np.asarray(x).astype(np.float64) + np.asarray(delta).astype(np.float64)
    assert (np.asarray(total) == exact.astype(np.float32).astype(total.dtype)).all()


@pytest.mark.parametrize("run", [interpreted, in_xla])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_what_is_added_may_be_in_pieces(run, pieces):
    """They are summed up in float32, and rounded with the residual stream alone."""
    x, _, scale = inputs(5, 96, jnp.bfloat16)
    delta = jnp.asarray(np.random.default_rng(1).normal(size=(pieces, 5, 96)), jnp.float32)
    total, normed = run(x, delta, scale)
    exact = np.asarray(x).astype(np.float64) + np.asarray(delta).astype(np.float64).sum(0)
    assert np.abs(np.asarray(total).astype(np.float64) - exact).max() <= np.abs(exact).max() * 2**-8
    # In float32 any order of adding is as good, and bfloat16 hides it but where it rounds.
    whole_total, whole_normed = run(x, delta.sum(axis=0, keepdims=True), scale)
    for got, wanted in ((total, whole_total), (normed, whole_normed)):
        got, wanted = (np.asarray(a).astype(np.float64) for a in (got, wanted))
        assert (np.abs(got - wanted) <= np.abs(wanted) * 2**-6).all()
        assert (got == wanted).mean() > 0.98


def test_no_pieces_at_all_are_refused():
    x, _, scale = inputs(2, 8, jnp.float32)
    with pytest.raises(ValueError, match=r"delta must have at least one piece, got \(0, 2, 8\)"):
        add_rms_norm(x, jnp.zeros((0, 2, 8)), scale, eps=EPS)


@pytest.mark.parametrize("pieces", [1, 4])
def test_its_gradient_is_that_of_the_two_operations(pieces):
    args = inputs(4, 48, jnp.float32, pieces=pieces)

    def loss(run):
        return lambda *a: sum(jnp.sum(jnp.sin(y)) for y in run(*a))

    got = jax.grad(loss(interpreted), argnums=(0, 1, 2))(*args)
    wanted = jax.grad(loss(in_xla), argnums=(0, 1, 2))(*args)
    for a, b in zip(got, wanted, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_batch_of_sequences_maps_over_it():
    x, delta, scale = inputs(6, 32, jnp.float32)
    batched = jax.vmap(interpreted, in_axes=(0, 0, None))
    got = batched(x.reshape(2, 3, 32), delta.reshape(2, 1, 3, 32), scale)
    for a, b in zip(got, in_xla(x, delta, scale), strict=True):
        assert np.allclose(a.reshape(6, 32), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "dim", "pieces"), [(1, 4096, 1), (256, 5120, 1), (2048, 1024, 2), (8, 576, 8)]
)
def test_it_lowers_for_cuda(rows, dim, pieces):
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((rows, dim), (pieces, rows, dim), (dim,))
    ]
    text = lower_for_hopper(lambda *a: kernel.add_rms_norm(*a, EPS), *args)
    assert "add_rms_norm" in text


def test_the_device_of_the_arrays_decides(monkeypatch):
    """As on a machine with a GPU, where a check may run on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = inputs(3, 64, jnp.float32)
    found = jax.jit(lambda *a: add_rms_norm(*a, eps=EPS))(*args)
    for a, b in zip(found, in_xla(*args), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
    text = lower_for_hopper(lambda *a: add_rms_norm(*a, eps=EPS), *args)
    assert "add_rms_norm" in text and "stablehlo.rsqrt" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": jnp.zeros((1, 2, 8))}, r"delta must be .* = \(1, 2, 4\), got \(1, 2, 8\)"),
        ({"delta": jnp.zeros((2, 4))}, r"delta must be \[pieces, tokens, dim\].* got \(2, 4\)"),
        ({"scale": jnp.zeros(8)}, r"scale must be .* = \(4,\), got \(8,\)"),
        ({"x": jnp.zeros(4)}, r"x must be \[tokens, dim\], got \(4,\)"),
        ({"scale": jnp.zeros(4, jnp.bfloat16)}, "float32; got bfloat16 and float32"),
        ({"delta": jnp.zeros((1, 2, 4), jnp.bfloat16)}, "float32; got float32 and bfloat16"),
        ({"implementation": "mosaic"}, "is not one of triton, xla"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    fitting = {"x": jnp.zeros((2, 4)), "delta": jnp.zeros((1, 2, 4)), "scale": jnp.zeros(4)}
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**{**fitting, **change}, eps=EPS)
