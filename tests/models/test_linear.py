"""The one matrix product of the model, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.layers.linear import MANY_TOKENS, product_dtype, project


@pytest.mark.parametrize("tokens", [3, MANY_TOKENS])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
def test_a_product_is_rounded_once(tokens, dtype, out_dtype):
    """Of 4096 terms; rounded on the way, their sum would be off by several units."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, 2, 2048)), dtype)
    weight = jnp.asarray(rng.normal(size=(5, 2, 2048)), dtype)
    out = jax.jit(lambda a, b: project(a, b, contract=2, out_dtype=out_dtype))(x, weight)
    assert out.dtype == (out_dtype or product_dtype(tokens, dtype)) and out.shape == (tokens, 5)
    wide_x, wide_weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    exact = np.einsum("tij,oij->to", wide_x, wide_weight)
    half_unit = 2**-8 if out.dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(out).astype(np.float64) - exact)
    assert (error <= np.abs(exact) * half_unit + 2e-3).all()
