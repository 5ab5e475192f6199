"""The header of a GGUF file: metadata and the list of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The `gguf` package names types and block formats; its own reader is not used, since it keeps an
array per string: half a minute and 650 MB for the 400,000 strings of Llama 3's vocabulary.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from convert.source import CheckpointError

_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header lists it.

    Attributes:
        shape: outermost dimension first (the file lists the innermost first).
        kind: number or block format.
        offset: of its first byte in the file.
        num_bytes: size of its data.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors of one file, by name.

    Raises:
        CheckpointError: it is no GGUF file, of another version or byte order, damaged, or shorter
            than its header says.
    """
    with path.open("rb") as file:
        return _Reader(path, file).header()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != b"GGUF":
            raise self._bad("it does not begin with the GGUF magic")
        if (version := self._int(4)) not in _VERSIONS:
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise self._bad(f"version {version} is not supported{hint}")
        num_tensors, num_fields = self._int(8), self._int(8)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in metadata:
                raise self._bad(f"the field {name!r} occurs twice")
            metadata[name] = self._value(self._type())
        listed = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._bad(f"general.alignment is {alignment!r}")
        start = math.ceil(self._file.tell() / alignment) * alignment
        return metadata, self._placed(listed, start)

    def _placed(self, listed: list[tuple[str, TensorInfo]], start: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, info in listed:
            if name in tensors:
                raise self._bad(f"the tensor {name!r} occurs twice")
            offset = start + info.offset
            if offset + info.num_bytes > self._size:
                raise self._bad(
                    f"it is cut short: {name} ends at byte {offset + info.num_bytes}, "
                    f"the file has {self._size}"
                )
            tensors[name] = TensorInfo(info.shape, info.kind, offset, info.num_bytes)
        return tensors

    def _tensor(self) -> tuple[str, TensorInfo]:
        """One entry of the list; its offset still counts from the start of the data."""
        name = self._text()
        shape = tuple(reversed([self._int(8) for _ in range(self._int(4))]))
        number = self._int(4)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._bad(f"{name} has the unknown format {number}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block_size:
            raise self._bad(f"{name}: shape {shape} does not fit blocks of {block_size}")
        return name, TensorInfo(
            shape, kind, self._int(8), math.prod(shape) // block_size * block_bytes
        )

    def _type(self) -> GGUFValueType:
        number = self._int(4)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._bad(f"unknown type {number} of a field") from None

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            dtype = _SCALARS[kind]
            return np.frombuffer(self._bytes(dtype.itemsize), dtype)[0].item()
        inner, count = self._type(), self._int(8)
        if inner in _SCALARS:
            dtype = _SCALARS[inner]
            return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
        return [self._value(inner) for _ in range(count)]

    def _text(self) -> str:
        try:
            return self._bytes(self._int(8)).decode()
        except UnicodeDecodeError as error:
            raise self._bad(f"a text is not UTF-8: {error}") from error

    def _int(self, num_bytes: int) -> int:
        return int.from_bytes(self._bytes(num_bytes), "little")

    def _bytes(self, count: int) -> bytes:
        left = self._size - self._file.tell()
        if count > left:
            raise self._bad(f"it is cut short: {count} bytes wanted, {left} left")
        return self._file.read(count)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path.name} is no readable GGUF file: {what}")
