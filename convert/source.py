"""What every reader of checkpoint files offers: headers first, then rows of one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint cannot be read as it stands; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as its file's header describes it.

    Attributes:
        shape: logical shape, outermost dimension first.
        dtype: what `TensorSource.read_rows` returns; float32 for a quantized tensor.
        quantized: name of the block format it is stored in, or None for plain numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    quantized: str | None = None


class TensorSource(Protocol):
    """Tensors in files whose headers have been read and checked, and whose data has not."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds tensors."""
        ...

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor, by the name its file gives it."""
        ...

    def read_rows(self, name: str, start: int, end: int) -> np.ndarray:
        """Rows `start : end` of the outermost dimension of a tensor, freshly read.

        Plain file reads, no memory map: pages of a map count as resident memory.

        Raises:
            CheckpointError: the file has become shorter than its header says.
        """
        ...


def read_exactly(path: Path, offset: int, num_bytes: int) -> np.ndarray:
    """`num_bytes` bytes of a file from `offset` on, as uint8.

    Raises:
        CheckpointError: the file ends before.
    """
    data = np.fromfile(path, dtype=np.uint8, count=num_bytes, offset=offset)
    if data.size != num_bytes:
        raise CheckpointError(
            f"{path.name}: wanted {num_bytes} bytes at {offset}, the file ends after {data.size}"
        )
    return data
