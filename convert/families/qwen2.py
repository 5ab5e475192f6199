"""Qwen 2 and 2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from convert.families.llamalike import read_llamalike, take_layers, take_qwen_windows
from convert.hf_config import Fields
from pagedjax.models.arch import ArchConfig


def arch_from_hf(hf: Fields) -> ArchConfig:
    """Read a Qwen 2 `config.json`. No field says that the biases exist: they always do."""
    hf.require("attention_bias", True)
    hf.require("use_mrope", False)
    windows = take_qwen_windows(hf, take_layers(hf))
    return read_llamalike(hf, "qwen2", windows=windows, qkv_bias=True)
