"""What a model is (`arch`) and the one decoder that runs it.

Names load on first use, so that reading an architecture does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.models.arch import ArchConfig as ArchConfig
    from pagedjax.models.arch import Llama3Scaling as Llama3Scaling
    from pagedjax.models.arch import RopeConfig as RopeConfig
    from pagedjax.models.decoder import Decoder as Decoder
    from pagedjax.models.generation import GenerationDefaults as GenerationDefaults
    from pagedjax.models.params import decoder_from_params as decoder_from_params
    from pagedjax.models.params import param_axes as param_axes
    from pagedjax.models.params import param_shapes as param_shapes
    from pagedjax.models.params import params_of as params_of

_HOME = {
    "ArchConfig": "arch",
    "Llama3Scaling": "arch",
    "RopeConfig": "arch",
    "Decoder": "decoder",
    "GenerationDefaults": "generation",
    "decoder_from_params": "params",
    "param_axes": "params",
    "param_shapes": "params",
    "params_of": "params",
}
__all__ = [  # noqa: F822  (loaded by __getattr__)
    "ArchConfig",
    "Llama3Scaling",
    "RopeConfig",
    "Decoder",
    "GenerationDefaults",
    "decoder_from_params",
    "param_axes",
    "param_shapes",
    "params_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
