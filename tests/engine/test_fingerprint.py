"""The digest of parameters sees every change, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine.fingerprint import weights_digest


def params(dtype="float32"):
    rng = np.random.default_rng(0)
    return {
        "a": jnp.asarray(rng.normal(size=(7, 33)).astype(np.dtype(dtype))),
        "b": jnp.asarray(rng.normal(size=(50,)).astype(np.dtype(dtype))),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_equal_parameters_have_equal_digests(dtype):
    assert weights_digest(params(dtype)) == weights_digest(dict(reversed(params(dtype).items())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_any_bit_at_any_place_changes_the_digest(dtype):
    original = params(dtype)
    seen = {weights_digest(original)}
    for at in range(0, 231, 5):
        bits = np.asarray(original["a"]).copy()
        bits.reshape(-1).view(np.uint8)[at * bits.itemsize] ^= 1
        seen.add(weights_digest({**original, "a": jnp.asarray(bits)}))
    assert len(seen) == 48


def test_swapped_elements_rows_names_and_shapes_change_the_digest():
    original = params()
    a = original["a"]
    others = [
        {**original, "a": a.at[0, 0].set(a[0, 1]).at[0, 1].set(a[0, 0])},
        {**original, "a": a[::-1]},
        {**original, "a": a.reshape(33, 7)},
        {"b": original["a"], "a": original["b"]},
        {"a": a},
        {**original, "a": -a},
    ]
    assert len({weights_digest(p) for p in [original, *others]}) == 7
