"""Keep compiled steps on disk, so that the second start takes seconds."""

from __future__ import annotations

import jax

from pagedjax.config import cache_home


def enable_compilation_cache() -> None:
    """Point JAX's persistent compilation cache at the user's cache directory.

    A cache that the surrounding program has configured is left alone. Every program is kept,
    small ones too: an engine consists of many.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    directory = cache_home() / "xla"
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
