"""Mistral: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from convert.families.llamalike import read_llamalike, take_layers
from convert.hf_config import Fields
from pagedjax.models.arch import ArchConfig

DEFAULT_WINDOW = 4096  # transformers' MistralConfig


def arch_from_hf(hf: Fields) -> ArchConfig:
    """Read a Mistral `config.json`. Only a null `sliding_window` means full attention."""
    if not hf.states("sliding_window"):
        hf.note(f"no sliding_window, the family's default {DEFAULT_WINDOW} is assumed")
        window: int | None = DEFAULT_WINDOW
    else:
        window = hf.take_int("sliding_window", None)
    return read_llamalike(hf, "mistral", windows=(window,) * take_layers(hf))
