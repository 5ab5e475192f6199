"""Keep compiled steps on disk, so that the second start takes seconds."""

from __future__ import annotations

import warnings

import jax

from pagedjax.config import cache_home


def enable_compilation_cache() -> None:
    """Point JAX's persistent compilation cache at the user's cache directory.

    A cache that the surrounding program has configured is left alone. Every program is kept,
    small ones too: an engine consists of many. Where the directory cannot be made, a warning says
    so and every start compiles anew.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = cache_home() / "xla"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled steps are not kept for the next start: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
