"""Rotary embedding against the published tables and complex arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.layers.rope import Rotation, inverse_frequencies
from pagedjax.models import Llama3Scaling, RopeConfig
from pallas_kernels import rotary_heads


def llama3(factor):
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    return RopeConfig(theta=5e5, scaling=scaling)


@pytest.mark.parametrize(
    ("head_dim", "factor", "known"),
    [
        (128, 8.0, {0: 1.0, 28: 0.00321144599, 29: 0.00216657076, 32: 0.000524846161,
                    36: 7.78465527e-05, 63: 3.06892599e-07}),
        (64, 32.0, {14: 0.00321144599, 15: 0.00129054793, 16: 0.000429556797,
                    18: 1.94616382e-05, 31: 9.41830673e-08}),
    ],
)  # fmt: skip
def test_llama3_scaling_gives_the_published_frequencies(head_dim, factor, known):
    """CV17: kept, interpolated and divided frequencies, all three."""
    table = inverse_frequencies(llama3(factor), head_dim)
    for index, value in known.items():
        assert abs(table[index] / value - 1) < 1e-5


def test_rotation_is_multiplication_by_a_complex_phase():
    rope, head_dim = RopeConfig(theta=1e4), 16
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 7, 1000], np.int32)
    x = rng.normal(size=(4, 3, head_dim)).astype(np.float32)
    half = head_dim // 2
    phase = np.exp(1j * positions[:, None] * 1e4 ** -(np.arange(half) / half))
    turned = (x[:, :2, :half] + 1j * x[:, :2, half:]) * phase[:, None]
    rotation = Rotation.at(jnp.asarray(positions), rope, head_dim)
    qkv = jnp.asarray(x)[None, :, None]  # one query, one key, one value
    got = jnp.concatenate(
        rotary_heads(qkv, rotation.cos, rotation.sin, dtype=jnp.float32)[:2], axis=1
    )
    wanted = np.concatenate([turned.real, turned.imag], axis=-1)
    assert np.abs(np.asarray(got) - wanted).max() < 1e-3  # float32 angles at position 1000
