"""Writes tiny GGUF files the way llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGML

from tests.support.tiny_models import BF16

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

# GPT-2's spelling of the 256 bytes as printable characters.
_PLAIN = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SPELLED = dict(zip(_PLAIN, map(chr, _PLAIN), strict=True))
for _byte in range(256):
    if _byte not in _SPELLED:
        _SPELLED[_byte] = chr(0x100 + len(_SPELLED) - len(_PLAIN))
BYTES = [_SPELLED[byte] for byte in range(256)]


def gguf_name(hf_name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if hf_name in _NAMES:
        return _NAMES[hf_name]
    _, _, layer, *module, kind = hf_name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES['.'.join(module)]}.{kind}"


def into_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp stores them for the llama architecture.

    Row `i` of the first half of a head and row `i` of its second half become neighbours.
    """
    size = rows.shape[0] // heads
    order = [h * size + half * size // 2 + i
             for h in range(heads) for i in range(size // 2) for half in (0, 1)]  # fmt: skip
    return rows[order]


def tokenizer_fields(
    vocab: int, pre: str = "smollm", merges: tuple[str, ...] = ("h e",), **fields: Any
) -> dict[str, Any]:
    """A byte-level vocabulary: two control tokens, one user-defined, bytes, merges, fillers."""
    tokens = ["<|end|>", "<|start|>", "<think>", *BYTES]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [3, 3, 4] + [1] * (len(tokens) - 3)
    fillers = vocab - len(tokens)
    tokens += [f"[PAD{index}]" for index in range(fillers)]
    types += [5] * fillers
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": list(merges),
        "bos_token_id": 1,
        "eos_token_id": 0,
        "padding_token_id": 0,
    } | fields


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    arch: str,
    kinds: Mapping[str, GGML] | GGML | None = None,
    raw: Mapping[str, tuple[np.ndarray, GGML]] | None = None,
    fields: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Write one file.

    Args:
        path: where.
        config: Hugging Face configuration that the sizes come from.
        tensors: under Hugging Face names, rows in Hugging Face order.
        arch: `general.architecture`.
        kinds: format of every matrix, or of some by Hugging Face name; others as they are.
        raw: further tensors under GGUF names, as bytes of a format.
        fields: architecture fields to add or replace, without prefix; None removes one.
        tokenizer: fields below `tokenizer.ggml`; None for the default vocabulary.
    """
    writer = gguf.GGUFWriter(path, arch)
    embed, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or embed // heads
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": embed,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    for name, value in (own | dict(fields or {})).items():
        _add(writer, f"{arch}.{name}", value)
    for name, value in (tokenizer or tokenizer_fields(config["vocab_size"])).items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    for name, array in tensors.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = into_pairs(array, heads if "q_proj" in name else kv_heads)
        kind = kinds if isinstance(kinds, GGML) and array.ndim > 1 else None
        kind = kinds.get(name) if isinstance(kinds, Mapping) else kind
        if kind is None and array.dtype == BF16:
            writer.add_tensor(gguf_name(name), array.view(np.uint8), raw_dtype=GGML.BF16)
        elif kind in (None, GGML.F32, GGML.F16):
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
        else:
            blocks = gguf.quantize(array.astype(np.float32), kind)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value is not None:
        writer.add_array(name, value)
