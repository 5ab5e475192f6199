"""Compiled programs of earlier starts, found without tracing them.

JAX's own cache is asked with the lowered program, so that a start from it still traces and lowers
everything, and for an engine's steps with their kernels that takes longer than the rest of it. Here
a program is found by what it depends on: its name and abstract arguments, and everything that is
the same for all programs of a process (`environment`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import logging
import os
import pickle
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.monitoring
from jax.experimental.serialize_executable import deserialize_and_load, serialize

MOST_BYTES = 4 << 30  # an engine for a GPU has about 0.1 GB of programs

_PACKAGES = ("pagedjax", "pallas_kernels")  # whose code and tables the programs are made from
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
_DIGEST_BYTES = 32

_log = logging.getLogger(__name__)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is to be compiled.

    Attributes:
        name: says, together with `arguments`, all that the program depends on in this process.
        function: a jitted function.
        arguments: its abstract ones, with shardings.
        options: XLA's.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any] | None

    def lower(self) -> Any:
        """Trace and lower it; a `jax.stages.Lowered`."""
        return self.function.lower(*self.arguments)


class ProgramStore:
    """A directory of compiled programs, a file each.

    A file that is not what was written, or that the device's runtime does not take, counts as
    absent, and so does one that cannot be read. Loading runs what a file holds: a directory that
    is not the user's own, or that others may write to, is not used.

    Args:
        directory: made when the first program is kept.
        device: the `jax.Device` where the programs run.
        most_bytes: what all files together may take; beyond that those go whose use is longest ago.
    """

    def __init__(self, directory: Path, device: Any, most_bytes: int = MOST_BYTES) -> None:
        self._directory = directory
        self._device = device
        self._most_bytes = most_bytes
        self._environment = environment(device)
        if device.platform == "gpu":
            # It tells the runtime where the library is that kept programs with such kernels need.
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")

    def renamed(self, function: FunctionT) -> FunctionT:
        """The function, by a name of its own in every environment; jit it afterwards.

        Then JAX's cache, which goes by the lowered program and so by its name, brings back nothing
        that this store has not, and what is compiled in a new environment can be kept.
        """
        function.__name__ = f"{function.__name__}_{self._environment[:8]}"
        return function

    def compile(self, program: Program, lowered: Any) -> tuple[Any, bool]:
        """Compile a program that is not here, and say whether it can be kept.

        It can unless JAX's cache has brought it: what was read from a file itself, not every
        runtime can write again.
        """
        _compiles.cache_hits = 0
        code = lowered.compile(program.options)
        return code, not _compiles.cache_hits

    def load(self, program: Program) -> Any | None:
        """The compiled program, on the device; None if it is not there."""
        path = self._path(program)
        try:
            self._check_own()
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # it may be there to be read only
            os.utime(path)
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            return None
        payload, inputs, outputs = pickle.loads(body)
        try:
            return deserialize_and_load(
                payload, inputs, outputs, self._device.client, [self._device]
            )
        except jax.errors.JaxRuntimeError as error:
            _log.info("a kept program is not taken, and compiled again: %s", error)
            return None

    def keep(self, program: Program, code: Any) -> None:
        """Write the file of what `compile` says can be kept; where that fails, a warning says so.

        Turning code into bytes keeps the interpreter to itself: best when nobody else needs it.
        """
        try:
            body = pickle.dumps(serialize(code))
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._check_own()
            # Beside its place and then into it, so that nobody ever finds half of it there.
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                try:
                    file.write(hashlib.sha256(body).digest() + body)
                    file.flush()
                    os.replace(file.name, self._path(program))
                except OSError:  # a full disk is not to be filled with what nobody will find
                    os.unlink(file.name)
                    raise
        except (OSError, jax.errors.JaxRuntimeError) as error:
            warnings.warn(f"a program is not kept for the next start: {error}", stacklevel=2)

    def _check_own(self) -> None:
        """Refuse a directory into which others can have put something.

        Raises:
            OSError: it is such a directory, or is not there.
        """
        status = self._directory.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"others than the user may write to {self._directory}")

    def trim(self) -> None:
        """Delete what is too much, also what a start that was broken off has left half written."""
        found: list[tuple[float, int, Path]] = []
        for path in self._directory.glob("*"):
            with contextlib.suppress(OSError):  # another process has just deleted it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        room = self._most_bytes
        for _, size, path in sorted(found, reverse=True):
            room -= size
            if room < 0:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, program: Program) -> Path:
        leaves, structure = jax.tree.flatten(program.arguments)
        parts = (program.name, str(structure), repr(leaves), repr(program.options))
        digest = hashlib.sha256("\n".join((self._environment, *parts)).encode())
        return self._directory / digest.hexdigest()


class _Compiles(threading.local):
    """How many compiles of this thread JAX's cache has answered."""

    cache_hits = 0


_compiles = _Compiles()


def _count_cache_hits(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _compiles.cache_hits += 1


jax.monitoring.register_event_listener(_count_cache_hits)


def environment(device: Any) -> str:
    """Digest of everything besides a program itself that its compiled code may depend on.

    That is the source of the packages which programs are made from, the libraries, the device and
    its runtime, XLA's flags and JAX's options. It is wide on purpose: what is compiled once too
    often costs a slow start, and nothing else.

    Args:
        device: a `jax.Device`.
    """
    digest = hashlib.sha256(source_digest())
    versions = [f"{library} {importlib.metadata.version(library)}" for library in _LIBRARIES]
    # As they are on this thread: some of them can be set for a block of code.
    options = [(n, getattr(jax.config, n, value)) for n, value in jax.config.values.items()]
    runtime = (device.platform, device.device_kind, device.id, device.client.platform_version)
    digest.update(repr((sys.version, versions, sorted(options), runtime)).encode())
    digest.update(os.environ.get("XLA_FLAGS", "").encode())
    return digest.hexdigest()


def source_digest() -> bytes:
    """Of the files that programs are made from, as they are now."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for name, content in _files(importlib.resources.files(package), package):
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.digest()


def _files(folder: Traversable, name: str) -> list[tuple[str, bytes]]:
    """Source and data files below a package's folder, by path, in a fixed order."""
    found: list[tuple[str, bytes]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            found += _files(entry, path)
        elif entry.name.endswith((".py", ".json")):
            found.append((path, entry.read_bytes()))
    return found


_SOURCE_AT_IMPORT = source_digest()


def source_is_as_imported() -> bool:
    """Whether the files still say what this process runs; if not, it must not use a store."""
    return source_digest() == _SOURCE_AT_IMPORT
