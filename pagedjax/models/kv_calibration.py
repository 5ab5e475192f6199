"""What a compressed KV cache has to know of a model's keys and values; measured, no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedjax.models.arch import ArchConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVCalibration:
    """Means and ranges over typical tokens, of keys as they are cached (rotated) and of values.

    Attributes:
        key_means: float32 `[layers, kv_heads, head_dim]`, what the keys of a head have in common.
        maxima: float32 `[layers, 2, kv_heads]`, largest magnitudes of keys less their means (0)
            and of values (1).
    """

    key_means: np.ndarray
    maxima: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Plain lists by field."""
        return {"key_means": self.key_means.tolist(), "maxima": self.maxima.tolist()}

    @classmethod
    def from_json(cls, data: Any, arch: ArchConfig) -> KVCalibration:
        """The inverse of `to_json`.

        Raises:
            ValueError: it does not fit the architecture, or is not finite.
        """
        wanted = {
            "key_means": (arch.layers, arch.kv_heads, arch.head_dim),
            "maxima": (arch.layers, 2, arch.kv_heads),
        }
        if not isinstance(data, Mapping) or data.keys() != wanted.keys():
            raise ValueError(f"a calibration has the fields {sorted(wanted)}")
        arrays: dict[str, np.ndarray] = {}
        for name, shape in wanted.items():
            try:
                array = np.array(data[name], np.float32)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} must be numbers of shape {shape}: {error}") from error
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"{name} must be finite and of shape {shape}, got {array.shape}")
            arrays[name] = array
        if arrays["maxima"].min() < 0:
            raise ValueError(f"maxima are not negative, got {arrays['maxima'].min()}")
        return cls(**arrays)
