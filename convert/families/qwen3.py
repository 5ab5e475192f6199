"""Qwen 3: normalised query and key heads whose width is a field of its own."""

from __future__ import annotations

from convert.families.llamalike import read_llamalike, take_layers, take_qwen_windows
from convert.hf_config import Fields
from pagedjax.models.arch import ArchConfig


def arch_from_hf(hf: Fields) -> ArchConfig:
    """Read a Qwen 3 `config.json`. Differs from Llama by qk_norm and an explicit head_dim."""
    bias = hf.take_bool("attention_bias", False)
    windows = take_qwen_windows(hf, take_layers(hf))
    return read_llamalike(
        hf,
        "qwen3",
        windows=windows,
        head_dim_default=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
