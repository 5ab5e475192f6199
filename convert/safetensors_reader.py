"""Safetensors files: a length, a JSON header, then the numbers.

Format: https://github.com/huggingface/safetensors#format. The header is read here rather than by
the library so that every claim in it is checked against the file before any data is touched, and
so that rows are read without mapping the file into memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.source import CheckpointError, Stored, read_exactly

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    offset: int  # of the tensor's first byte in the file
    stored: Stored


class SafetensorsSource:
    """Tensors of one safetensors file, or of the shards that an index names.

    Only headers are read; a file that is shorter or longer than its header says is refused.

    Args:
        directory: where the checkpoint lies. `model.safetensors` or the index decides which files
            count; any other file in it is left alone.

    Raises:
        CheckpointError: no such files, a damaged header, a shard missing or outside the directory,
            or index and shards that disagree.
    """

    def __init__(self, directory: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        index = directory / INDEX_NAME
        if index.exists():
            self._files = self._open_shards(directory, _read_index(index))
        else:
            self._files = (directory / SINGLE_NAME,)
            self._entries.update(read_header(self._files[0]))
        self._stored = {name: entry.stored for name, entry in self._entries.items()}

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files in use, sorted by name."""
        return self._files

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor by name."""
        return self._stored

    def read_rows(self, name: str, start: int, end: int) -> np.ndarray:
        """Rows `start : end` of a tensor, in its own dtype."""
        entry = self._entries[name]
        row_shape = entry.stored.shape[1:]
        row_bytes = math.prod(row_shape) * entry.stored.dtype.itemsize
        data = read_exactly(entry.path, entry.offset + start * row_bytes, (end - start) * row_bytes)
        return data.view(entry.stored.dtype).reshape(end - start, *row_shape)

    def _open_shards(self, directory: Path, shard_of: dict[str, str]) -> tuple[Path, ...]:
        shards = sorted(set(shard_of.values()))
        missing = [shard for shard in shards if not (directory / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{INDEX_NAME} names {len(shards)} shards, {len(missing)} are missing: "
                f"{', '.join(missing[:5])}"
            )
        for shard in shards:
            entries = read_header(directory / shard)
            indexed = {name for name, holder in shard_of.items() if holder == shard}
            if absent := sorted(indexed - set(entries)):
                raise CheckpointError(
                    f"{shard} lacks tensors that the index puts there: {absent[:5]}"
                )
            if surplus := sorted(set(entries) - indexed):
                raise CheckpointError(f"{shard} holds tensors that the index lacks: {surplus[:5]}")
            self._entries.update(entries)
        return tuple(directory / shard for shard in shards)


def read_header(path: Path) -> dict[str, _Entry]:
    """Every tensor of one file, with its place in it, once the header has been checked.

    Raises:
        CheckpointError: the file is no safetensors file, or not as long as its header says.
    """
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path.name}: {size} bytes are too short for a safetensors file")
    first = read_exactly(path, 0, min(size, 512)).tobytes()
    if first.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path.name} is a git-LFS pointer, not the file itself")
    length = int.from_bytes(first[:8], "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path.name} is no safetensors file, or cut short: its header would have {length} "
            f"bytes, the file has {size}"
        )
    try:
        header = json.loads(
            read_exactly(path, 8, length).tobytes().decode(), object_pairs_hook=_without_repeats
        )
    except ValueError as error:
        raise CheckpointError(f"{path.name}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: the header is not a JSON object")
    header.pop("__metadata__", None)
    return _entries(path, header, start=8 + length, size=size)


def _entries(path: Path, header: dict[str, Any], *, start: int, size: int) -> dict[str, _Entry]:
    entries = {}
    spans = []
    for name, spec in header.items():
        shape, dtype, (begin, end) = _parsed(path, name, spec)
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{path.name}: {name} has {end - begin} bytes, shape {shape} of {dtype} needs "
                f"{math.prod(shape) * dtype.itemsize}"
            )
        spans.append((begin, end))
        entries[name] = _Entry(path, start + begin, Stored(shape, dtype))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise CheckpointError(
                f"{path.name}: tensors overlap or leave a hole at byte {position}"
            )
        position = end
    if start + position != size:
        raise CheckpointError(
            f"{path.name}: the header describes {start + position} bytes, the file has {size}"
        )
    return entries


def _parsed(path: Path, name: str, spec: Any) -> tuple[tuple[int, ...], np.dtype, tuple[int, int]]:
    try:
        dtype_name, shape, (begin, end) = spec["dtype"], spec["shape"], spec["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path.name}: header entry {name!r} is malformed") from None
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise CheckpointError(f"{path.name}: header entry {name!r} has impossible numbers")
    if dtype_name not in _DTYPES:
        raise CheckpointError(f"{path.name}: {name} has unknown dtype {dtype_name!r}")
    return tuple(shape), _DTYPES[dtype_name], (begin, end)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _read_index(path: Path) -> dict[str, str]:
    """The index's `weight_map`: tensor name to shard, a plain file name beside the index."""
    try:
        shard_of = json.loads(path.read_bytes())["weight_map"]
        pairs = list(shard_of.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is no index of shards: {error}") from error
    for name, shard in pairs:
        plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not plain or shard in ("", ".."):
            raise CheckpointError(
                f"{path.name} puts {name} into {shard!r}, which is not a file of this directory"
            )
    if not pairs:
        raise CheckpointError(f"{path.name} names no tensors")
    return shard_of
