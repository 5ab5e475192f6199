"""GGUF files (llama.cpp), read through the `gguf` package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package parses header and
metadata and knows the block formats; tensor data is read from the file a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as GGML

from convert.source import CheckpointError, Stored, read_exactly

_PLAIN = {
    GGML.F32: np.dtype(np.float32),
    GGML.F16: np.dtype(np.float16),
    GGML.BF16: np.dtype(ml_dtypes.bfloat16),
}
_BLOCK_FORMATS = frozenset({GGML.Q8_0, GGML.Q4_0, GGML.Q4_1, GGML.Q4_K, GGML.Q6_K})


class GGUFSource:
    """Metadata and tensors of one GGUF file.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is no GGUF file, is cut short, is one part of several, or holds a
            tensor in a format that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path.name} does not begin with the GGUF magic")
        try:
            reader = gguf.GGUFReader(path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        # What the package raises on a damaged file: its reads beyond the end come back short.
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{path.name} is cut short or damaged, its header cannot be read: {error}"
            ) from error
        self._tensors = {tensor.name: _Place.of(path, tensor) for tensor in reader.tensors}
        self._stored = {name: place.stored for name, place in self._tensors.items()}
        size = path.stat().st_size
        for name, place in self._tensors.items():
            if place.offset + place.num_bytes > size:
                raise CheckpointError(
                    f"{path.name} is cut short: {name} ends at byte "
                    f"{place.offset + place.num_bytes}, the file has {size}"
                )
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(f"{path.name} is one part of a split file; merge the parts first")

    @property
    def files(self) -> tuple[Path, ...]:
        """The one file."""
        return (self._path,)

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor by name; block formats read as float32."""
        return self._stored

    def read_rows(self, name: str, start: int, end: int) -> np.ndarray:
        """Rows `start : end` of a tensor, dequantized to float32 if it is in a block format."""
        place = self._tensors[name]
        rows = place.stored.shape[0]
        row_bytes = place.num_bytes // rows
        data = read_exactly(self._path, place.offset + start * row_bytes, (end - start) * row_bytes)
        shape = (end - start, *place.stored.shape[1:])
        if place.stored.quantized is None:
            return data.view(place.stored.dtype).reshape(shape)
        blocks = data.reshape(end - start, row_bytes)
        return gguf.dequantize(blocks, place.kind).reshape(shape)


class _Place:
    """Where a tensor lies in the file and in which format."""

    def __init__(self, stored: Stored, kind: GGML, offset: int, num_bytes: int) -> None:
        self.stored, self.kind, self.offset, self.num_bytes = stored, kind, offset, num_bytes

    @classmethod
    def of(cls, path: Path, tensor: gguf.ReaderTensor) -> _Place:
        kind = tensor.tensor_type
        if kind not in _PLAIN and kind not in _BLOCK_FORMATS:
            supported = ", ".join(sorted(one.name for one in (*_PLAIN, *_BLOCK_FORMATS)))
            raise CheckpointError(
                f"{path.name}: {tensor.name} is stored as {kind.name}, supported: {supported}"
            )
        shape = tuple(
            int(size) for size in reversed(tensor.shape)
        )  # the file lists innermost first
        dtype = _PLAIN.get(kind, np.dtype(np.float32))
        stored = Stored(shape, dtype, None if kind in _PLAIN else kind.name)
        return cls(stored, kind, int(tensor.data_offset), int(tensor.n_bytes))


def shortest(value: Any) -> float:
    """The shortest decimal that is this float32, so that 9.9999997e-06 is 1e-05 again."""
    return float(str(np.float32(value)))
