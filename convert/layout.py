"""Names inside a native checkpoint directory.

params/                 Orbax tree {dotted name: array}
arch.json               ArchConfig
generation_config.json  GenerationDefaults
tokenizer/              what transformers needs to load the tokenizer; absent if there is none
kv_calibration.json     for a compressed KV cache; absent until it has been measured
manifest.json           format and version, tensors, the source files with their hashes
"""

from __future__ import annotations

from pathlib import Path

FORMAT = "pagedjax-checkpoint"
FORMAT_VERSION = 1
MANIFEST, ARCH, GENERATION = "manifest.json", "arch.json", "generation_config.json"
KV_CALIBRATION = "kv_calibration.json"
PARAMS, TOKENIZER = "params", "tokenizer"


def is_native(path: Path) -> bool:
    """Whether a directory is a complete native checkpoint."""
    return (path / MANIFEST).is_file() and (path / PARAMS).is_dir()
