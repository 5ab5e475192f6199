"""Tiny random checkpoints of every family, as Hugging Face directories.

`VARIANTS` are configurations in which nothing coincides by accident: grouped heads, a head_dim
that is not embed / heads where the family allows it, windows shorter than the prompts, biases that
are not zero. `write_checkpoint` writes one with numpy alone; `save_with_transformers` lets
transformers create and save the model itself, so that a test compares with the original.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _variant(model_type: str, class_name: str, **fields: Any) -> dict[str, Any]:
    return _COMMON | {"model_type": model_type, "architectures": [class_name]} | fields


def _llama(**fields: Any) -> dict[str, Any]:
    return _variant("llama", "LlamaForCausalLM", **fields)


def _qwen2(**fields: Any) -> dict[str, Any]:
    return _variant("qwen2", "Qwen2ForCausalLM", **fields)


def _qwen3(**fields: Any) -> dict[str, Any]:
    return _variant("qwen3", "Qwen3ForCausalLM", head_dim=24, **fields)


VARIANTS: Mapping[str, dict[str, Any]] = {
    "llama": _llama(head_dim=24),
    "llama_tied": _llama(tie_word_embeddings=True, num_hidden_layers=3, num_key_value_heads=1),
    "llama_bias": _llama(attention_bias=True),
    "llama3_scaling": _llama(
        rope_theta=500000.0, rope_scaling=_LLAMA3_SCALING, num_key_value_heads=4
    ),
    "mistral": _variant("mistral", "MistralForCausalLM", head_dim=24, sliding_window=20),
    "mistral_full": _variant("mistral", "MistralForCausalLM", sliding_window=None),
    "qwen2": _qwen2(tie_word_embeddings=True, use_sliding_window=False),
    "qwen2_sliding": _qwen2(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": _qwen3(),
    "qwen3_bias": _qwen3(attention_bias=True, tie_word_embeddings=True, rope_theta=1000000.0),
}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that transformers saves for a configuration."""
    embed, mlp, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or embed // q_heads
    rows = {"q": q_heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    bias = config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for letter, size in rows.items():
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (size, embed)
            if bias or config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (size,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (embed, rows["q"])
        if bias:
            shapes[f"{prefix}self_attn.o_proj.bias"] = (embed,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (mlp, embed)
        shapes[f"{prefix}mlp.up_proj.weight"] = (mlp, embed)
        shapes[f"{prefix}mlp.down_proj.weight"] = (embed, mlp)
        shapes[f"{prefix}input_layernorm.weight"] = (embed,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (embed,)
    shapes["model.norm.weight"] = (embed,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    return shapes


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    """Weights that keep activations near 1; norms near 1, and biases, that are all different."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        center = 1.0 if name.endswith("norm.weight") else 0.0
        tensors[name] = (center + spread * rng.standard_normal(shape)).astype(dtype)
    return tensors


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
) -> dict[str, np.ndarray]:
    """Write `config.json` and safetensors with numpy alone; gives the tensors back.

    Args:
        directory: created.
        config: contents of `config.json`.
        tensors: None for random ones in float32 as the configuration wants them.
        shards: with more than one, tensors are dealt out in turn and an index is written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is None:
        tensors = random_tensors(tensor_shapes(config))
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return dict(tensors)
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        share = {name: tensors[name] for name in names[shard::shards]}
        save_file(share, directory / file_name)
        weight_map |= dict.fromkeys(share, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return dict(tensors)


def save_with_transformers(directory: Path, config: Mapping[str, Any]) -> Any:
    """Let transformers build a random model from a configuration and save it; needs PyTorch.

    Returns:
        The model, in float32 with eager attention, ready to compute logits.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "architectures"}
    hf_config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, value in random_tensors(shapes).items():
            model.get_parameter(name).copy_(torch.from_numpy(value))
    model.save_pretrained(directory)
    return model


BF16 = np.dtype(ml_dtypes.bfloat16)
