"""A GGUF file's metadata as an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.families.llamalike import take_layers
from convert.gguf_reader import GGUFSource, shortest
from convert.hf_config import Fields
from convert.source import CheckpointError
from pagedjax.models.arch import ArchConfig, Llama3Scaling, RopeConfig
from pagedjax.models.generation import GenerationDefaults

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` values that can be read; Mistral files call themselves llama."""

ROPE_FREQS = "rope_freqs.weight"

# Every public model with this scaling was trained with these three; only `factor` differs.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}


def read_arch(source: GGUFSource) -> tuple[ArchConfig, list[str]]:
    """The architecture of a GGUF file, and remarks about defaults.

    Biases and an output projection of their own are there if their tensors are.

    Raises:
        CheckpointError: unknown architecture, or a field absent, unsupported or not understood.
    """
    name = source.metadata.get("general.architecture")
    where = source.files[0].name
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: unknown architecture {name!r}, known: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{name}."
    own = {k.removeprefix(prefix): v for k, v in source.metadata.items() if k.startswith(prefix)}
    fields = Fields(own, where)
    heads, embed = fields.take_int("attention.head_count"), fields.take_int("embedding_length")
    rope_dim = fields.take_int("rope.dimension_count", None)
    head_dim = fields.take_int("attention.key_length", rope_dim or embed // max(heads, 1))
    fields.require("attention.value_length", head_dim)
    if rope_dim not in (None, head_dim):
        raise CheckpointError(f"{where}: rope.dimension_count {rope_dim}, head width {head_dim}")
    layers = take_layers(fields, "block_count")
    window = fields.take_int("attention.sliding_window", 0) or None
    tensors = source.stored
    values: dict[str, Any] = {
        "kv_heads": fields.take_int("attention.head_count_kv", heads),
        "mlp": fields.take_int("feed_forward_length"),
        "norm_eps": shortest(fields.take_float("attention.layer_norm_rms_epsilon")),
        "max_positions": fields.take_int("context_length"),
        "vocab": fields.take_int("vocab_size", _embedding_rows(source)),
        "rope": _rope(fields, source, head_dim),
    }
    fields.require("expert_count", 0)
    fields.require("expert_used_count", 0)
    fields.finish()
    try:
        arch = ArchConfig(
            family=name,
            embed=embed,
            layers=layers,
            q_heads=heads,
            head_dim=head_dim,
            windows=(window,) * layers,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            out_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tied="output.weight" not in tensors,
            **values,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return arch, fields.notes


def read_generation(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Special ids of a GGUF file; end of text, of turn and of message all end a generation."""
    prefix = "tokenizer.ggml."
    fields = Fields(
        {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, prefix
    )
    ids = {
        kind: fields.take_int(f"{kind}_token_id", None)
        for kind in ("eos", "eot", "eom", "bos", "padding")
    }
    ends = [ids[kind] for kind in ("eos", "eot", "eom") if ids[kind] is not None]
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(ends)), bos_id=ids["bos"], pad_id=ids["padding"]
    )


def rotary_order(arch: ArchConfig) -> bool:
    """Whether the file keeps query and key rows in pairs (2i, 2i + 1) instead of halves.

    llama.cpp rotates neighbouring rows for the `llama` architecture and halves for the others.
    """
    return arch.family == "llama"


def halves_from_pairs(rows: np.ndarray) -> np.ndarray:
    """Reorder head_dim, the last axis, from neighbouring pairs to two halves.

    `[a0, b0, a1, b1, ...] -> [a0, a1, ..., b0, b1, ...]`
    """
    *outer, head_dim = rows.shape
    return rows.reshape(*outer, head_dim // 2, 2).swapaxes(-1, -2).reshape(rows.shape)


def _embedding_rows(source: GGUFSource) -> int:
    if "token_embd.weight" not in source.stored:
        raise CheckpointError(f"{source.files[0].name} lacks the tensor 'token_embd.weight'")
    return source.stored["token_embd.weight"].shape[0]


def _rope(fields: Fields, source: GGUFSource, head_dim: int) -> RopeConfig:
    fields.require("rope.scaling.type", "none")
    theta = fields.take_float("rope.freq_base", None)
    if theta is None:
        fields.note("no rope.freq_base, the default 10000 is assumed")
        theta = 10_000.0
    theta = shortest(theta)
    if ROPE_FREQS not in source.stored:
        return RopeConfig(theta=theta)
    if source.stored[ROPE_FREQS].shape != (head_dim // 2,):
        raise CheckpointError(
            f"{fields.where}: {ROPE_FREQS} has shape {source.stored[ROPE_FREQS].shape}, "
            f"wanted {(head_dim // 2,)}"
        )
    divisors = source.read_rows(ROPE_FREQS, 0, head_dim // 2).astype(np.float64)
    scaling = Llama3Scaling(factor=shortest(divisors.max()), **_LLAMA3)
    expected = _llama3_divisors(theta, head_dim, scaling)
    if not np.allclose(divisors, expected, rtol=1e-5, atol=0):
        raise CheckpointError(
            f"{fields.where}: {ROPE_FREQS} scales frequencies in a way other than Llama 3's "
            f"(largest divisor {scaling.factor:g})"
        )
    return RopeConfig(theta=theta, scaling=scaling)


def _llama3_divisors(theta: float, head_dim: int, scaling: Llama3Scaling) -> np.ndarray:
    """What each rotary frequency is divided by; float64[head_dim / 2].

    The formula of `transformers.modeling_rope_utils._compute_llama3_parameters`.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions / (
        2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    )
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
