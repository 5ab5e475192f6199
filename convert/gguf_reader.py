"""Tensors of GGUF files (llama.cpp); the `gguf` package knows the block formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as GGML

from convert.gguf_header import TensorInfo, read_gguf_header
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
        self.metadata, self._tensors = read_gguf_header(path)
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(f"{path.name} is one part of a split file; merge the parts first")
        self._stored = {name: self._described(name, info) for name, info in self._tensors.items()}

    metadata: Mapping[str, Any]
    """Every field by its full name."""

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
        info, stored = self._tensors[name], self._stored[name]
        row_bytes = info.num_bytes // stored.shape[0]
        data = read_exactly(self._path, info.offset + start * row_bytes, (end - start) * row_bytes)
        shape = (end - start, *stored.shape[1:])
        if stored.quantized is None:
            return data.view(stored.dtype).reshape(shape)
        return gguf.dequantize(data.reshape(end - start, row_bytes), info.kind).reshape(shape)

    def _described(self, name: str, info: TensorInfo) -> Stored:
        if info.kind in _PLAIN:
            return Stored(info.shape, _PLAIN[info.kind])
        # A row of blocks is dequantized by itself, which needs rows.
        if info.kind not in _BLOCK_FORMATS or len(info.shape) < 2:
            supported = ", ".join(sorted(one.name for one in (*_PLAIN, *_BLOCK_FORMATS)))
            raise CheckpointError(
                f"{self._path.name}: {name} is stored as {info.kind.name} of shape {info.shape}, "
                f"supported: {supported}, in blocks for matrices only"
            )
        return Stored(info.shape, np.dtype(np.float32), info.kind.name)


def shortest(value: Any) -> float:
    """The shortest decimal that is this float32, so that 9.9999997e-06 is 1e-05 again."""
    return float(str(np.float32(value)))
