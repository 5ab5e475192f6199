"""The native checkpoint on disk: written tensor by tensor, visible only once it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from convert.checkpoint import Checkpoint, NativeTensor
from convert.layout import (
    ARCH,
    FORMAT,
    FORMAT_VERSION,
    GENERATION,
    MANIFEST,
    PARAMS,
    TOKENIZER,
    is_native,
)
from convert.source import CheckpointError

Progress = Callable[[NativeTensor], None]
"""Called after each tensor has been written."""


def write_native(
    checkpoint: Checkpoint,
    dst: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint in the native format.

    Everything goes into a hidden directory beside `dst` that is renamed at the very end: at no
    moment does `dst` hold half a checkpoint. What an earlier, killed conversion left there is
    removed first. Host memory stays within the largest tensor plus a fixed amount.

    Args:
        checkpoint: what to write.
        dst: directory to create.
        dtype: `bfloat16`, `float16` or `float32`; None keeps what is stored.
        overwrite: whether to replace a native checkpoint at `dst`; nothing else is ever replaced.
        progress: called after each tensor.

    Raises:
        ValueError: `dst` exists and may not be replaced, or an unknown dtype.
        OSError: the disk is full or `dst` cannot be written; nothing is left behind.
    """
    dst = Path(os.path.abspath(dst))
    tensors = list(checkpoint.tensors(dtype))
    with _partial_directory(dst) as partial:
        _put_back(dst)
        check_destination(dst, overwrite)
        save_params(tensors, partial / PARAMS, progress)
        _write_json(partial / ARCH, checkpoint.arch.to_json())
        _write_json(partial / GENERATION, checkpoint.generation.to_json())
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(partial / TOKENIZER)
        _write_json(partial / MANIFEST, _manifest(checkpoint, tensors, partial / PARAMS))
        _sync(partial)
        _move_into_place(partial, dst)


class _StreamingHandler(ocp.type_handlers.NumpyHandler):
    """Writes a lazy leaf by reading it, writing it as an array, and letting go of it.

    Orbax hands all leaves of a type over at once and would hold them all. Its metadata calls the
    result a plain numpy array, so that any Orbax restores it without this class.
    """

    def __init__(self, progress: Progress | None) -> None:
        # The array is ours alone, so no copy guards it against later changes.
        super().__init__(deepcopy_host_arrays=False)
        self._progress = progress

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Write one leaf after the other; nothing is left to wait for."""
        each = args or [ocp.SaveArgs()] * len(values)
        for tensor, info, arg in zip(values, infos, each, strict=True):
            await self._write(tensor, info, arg)
            if self._progress is not None:
                self._progress(tensor)
        return []

    async def _write(
        self, tensor: NativeTensor, info: ocp.type_handlers.ParamInfo, arg: ocp.SaveArgs
    ) -> None:
        # A call of its own: on return nothing refers to the array any more.
        for write in await super().serialize([tensor.load()], [info], [arg]):
            write.result()


def save_params(
    tensors: Sequence[NativeTensor], directory: Path, progress: Progress | None = None
) -> None:
    """Save tensors as an Orbax tree `{name: array}`, holding one of them at a time.

    Args:
        tensors: what to save.
        directory: where; must not exist.
        progress: called after each tensor.

    Raises:
        OSError: the arrays cannot be written, for instance because the disk is full.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (NativeTensor, _StreamingHandler(progress)),
        (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),  # Orbax warns without it
    )
    # Uncompressed, an array goes to disk without a second copy of it, and weights hardly shrink.
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    tree = {tensor.name: tensor for tensor in tensors}
    with _errors_raised_only(), ocp.Checkpointer(handler) as checkpointer:
        try:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))
        except CheckpointError:
            raise
        except ValueError as error:  # TensorStore's, for every failed write
            raise _as_os_error(error, directory) from error


@contextlib.contextmanager
def _errors_raised_only() -> Iterator[None]:
    """Keep Orbax from also logging, with a traceback, an error that it raises."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _as_os_error(error: ValueError, directory: Path) -> OSError:
    number = re.search(r"os_error_code='(\d+)'", str(error))
    if number is None:
        return OSError(f"cannot write {str(directory)!r}: {error}")
    return OSError(int(number[1]), os.strerror(int(number[1])), str(directory))


def check_destination(dst: Path, overwrite: bool) -> None:
    """Whether a conversion may write to `dst`.

    Raises:
        CheckpointError: something is there that may not be replaced.
    """
    if not dst.exists() and not dst.is_symlink():
        return
    if dst.is_symlink() or not is_native(dst):
        raise CheckpointError(
            f"{str(dst)!r} exists already and is not a native checkpoint, so it is not replaced"
        )
    if not overwrite:
        raise CheckpointError(f"{str(dst)!r} exists already; with overwrite it is replaced")


@contextlib.contextmanager
def _partial_directory(dst: Path) -> Iterator[Path]:
    """An empty hidden directory beside `dst`, gone afterwards unless it was moved into place.

    It is locked for as long as the process lives, which tells a killed conversion's left-over,
    to be removed, from a running conversion's work.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = dst.parent / f".{dst.name}.partial"
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another conversion is writing {str(dst)!r}") from None
        try:
            for left_over in partial.iterdir():
                shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(descriptor)


def _move_into_place(partial: Path, dst: Path) -> None:
    replaced = _replaced(dst)
    if dst.exists():
        dst.rename(replaced)
    try:
        partial.rename(dst)
    except OSError:
        _put_back(dst)
        raise
    _sync_directory(dst.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _put_back(dst: Path) -> None:
    """Undo a replacement that was cut short between moving the old away and the new in."""
    replaced = _replaced(dst)
    if dst.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        replaced.rename(dst)


def _replaced(dst: Path) -> Path:
    return dst.parent / f".{dst.name}.replaced"


def _manifest(
    checkpoint: Checkpoint, tensors: Sequence[NativeTensor], params: Path
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "source": {
            "format": checkpoint.names,
            "files": [
                {"name": file.name, "size": file.stat().st_size, "sha256": _sha256(file)}
                for file in checkpoint.files
            ],
        },
        "tensors": {
            tensor.name: {"shape": list(tensor.shape), "dtype": tensor.dtype.name}
            for tensor in tensors
        },
        # Sizes tell at once whether a copy of the checkpoint is complete.
        "params_files": {
            str(file.relative_to(params)): file.stat().st_size
            for file in sorted(params.rglob("*"))
            if file.is_file()
        },
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _sync(directory: Path) -> None:
    """Make the files' contents durable, or the rename could outlive them in a power cut."""
    for parent, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_directory(Path(parent))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
