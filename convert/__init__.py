"""Read Hugging Face and GGUF checkpoints; write the native one.

Names load on first use, so that opening a checkpoint does not import Orbax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint as Checkpoint
    from convert.checkpoint import NativeTensor as NativeTensor
    from convert.checkpoint import open_checkpoint as open_checkpoint
    from convert.conversion import CheckFailed as CheckFailed
    from convert.conversion import ConversionReport as ConversionReport
    from convert.conversion import convert as convert
    from convert.source import CheckpointError as CheckpointError
    from convert.writer import write_native as write_native

_HOME = {
    "CheckFailed": "conversion",
    "Checkpoint": "checkpoint",
    "CheckpointError": "source",
    "ConversionReport": "conversion",
    "NativeTensor": "checkpoint",
    "convert": "conversion",
    "open_checkpoint": "checkpoint",
    "write_native": "writer",
}
__all__ = [  # noqa: F822  (loaded by __getattr__)
    "CheckFailed",
    "Checkpoint",
    "CheckpointError",
    "ConversionReport",
    "NativeTensor",
    "convert",
    "open_checkpoint",
    "write_native",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
