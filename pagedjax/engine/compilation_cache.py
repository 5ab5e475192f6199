"""Keep compiled steps on disk, so that the second start takes seconds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax

from pagedjax.config import cache_home
from pagedjax.engine.program_store import ProgramStore, source_is_as_imported


def enable_compilation_cache() -> None:
    """Point JAX's persistent compilation cache at the user's cache directory.

    A cache that the surrounding program has configured is left alone. Every program is kept,
    small ones too: an engine consists of many. Where the directory cannot be made, a warning says
    so and every start compiles anew.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = _directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled steps are not kept for the next start: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def program_store(device: Any) -> ProgramStore | None:
    """Where an engine's programs are kept to be found without tracing them.

    Beside JAX's cache in the user's cache directory, and only with it: a program that another
    cache of JAX brings back could not be kept a second time. None on a CPU, where a program is
    traced in little time and compiled for the very machine, and where source files have been edited
    since they were imported.

    Args:
        device: the `jax.Device` where they run.
    """
    here = jax.config.values["jax_compilation_cache_dir"] == str(_directory())
    if device.platform == "cpu" or not here or not source_is_as_imported():
        return None
    return ProgramStore(cache_home() / "programs", device)


def _directory() -> Path:
    return cache_home() / "xla"
