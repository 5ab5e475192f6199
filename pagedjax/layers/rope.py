"""Rotary position embedding (Su et al., arXiv:2104.09864), half-split layout."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.models.arch import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair: float32 `[head_dim / 2]`.

    Llama 3's scaling keeps short wavelengths, divides long ones by `factor`, and interpolates
    linearly in original_max_positions / wavelength between the two.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponents
    if rope.scaling is None:
        return plain.astype(np.float32)
    s = rope.scaling
    turns = s.original_max_positions * plain / (2 * math.pi)  # rotations within the old context
    kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return ((1 - kept) * plain / s.factor + kept * plain).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens, computed once and used by every layer."""

    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]

    @classmethod
    def at(cls, positions: Int[Array, " tokens"], rope: RopeConfig, head_dim: int) -> "Rotation":
        """Angles for absolute `positions`, float32."""
        freqs = jnp.asarray(inverse_frequencies(rope, head_dim))
        angles = positions.astype(jnp.float32)[:, None] * freqs[None, :]
        return cls(jnp.cos(angles), jnp.sin(angles))
