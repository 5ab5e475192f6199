"""Llama 2, 3, 3.1 to 3.3, and models of that shape such as SmolLM2."""

from __future__ import annotations

from convert.families.llamalike import read_llamalike, take_layers
from convert.hf_config import Fields
from pagedjax.models.arch import ArchConfig


def arch_from_hf(hf: Fields) -> ArchConfig:
    """Read a Llama `config.json`. `attention_bias` puts biases on all four projections."""
    hf.require("rope_interleaved", False)  # SmolLM2 states it
    bias = hf.take_bool("attention_bias", False)
    windows = (None,) * take_layers(hf)
    return read_llamalike(
        hf, "llama", windows=windows, kv_heads_required=False, qkv_bias=bias, out_bias=bias
    )
