"""Where every native tensor comes from, as data: one table for all families built alike.

A native tensor is filled from one or more stored ones. A `Piece` says how the stored dimensions
read in terms of the architecture (`"(kv_heads group head_dim) embed"`: parentheses join
dimensions that are one in the file) and which part of the native tensor they fill. Nothing is
transposed: both sides keep [out, in].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagedjax.models.arch import ArchConfig

_LAYER = "layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_GGUF_LAYER = "blk.{layer}."


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor's share of a native one.

    Attributes:
        hf: its name in a Hugging Face checkpoint.
        gguf: its name in a GGUF file.
        dims: the stored dimensions; parentheses join dimensions that the file keeps as one.
        at: index of the filled part in the native tensor.
        rotary: whether its head_dim rows are query or key dimensions that get rotated, which
            GGUF stores in another order for some architectures.
    """

    hf: str
    gguf: str
    dims: str
    at: tuple[int | slice, ...] = ()
    rotary: bool = False

    def stored_shape(self, arch: ArchConfig) -> tuple[int, ...]:
        """Shape in the file."""
        return tuple(math.prod(joined) for joined in self._joined(arch))

    def dim_sizes(self, arch: ArchConfig) -> tuple[int, ...]:
        """Shape with the joined dimensions taken apart."""
        return tuple(size for joined in self._joined(arch) for size in joined)

    def _joined(self, arch: ArchConfig) -> Iterator[tuple[int, ...]]:
        for together, alone in re.findall(r"\(([^)]*)\)|(\w+)", self.dims):
            yield tuple(getattr(arch, dim) for dim in (together or alone).split())


@dataclass(frozen=True, slots=True)
class Rule:
    """A native tensor and its pieces; `{layer}` in a name stands for the layer's index.

    Attributes:
        native: name in the native checkpoint.
        pieces: what fills it, completely.
        needs: the architecture must have this flag, or must not if it starts with `not `.
    """

    native: str
    pieces: tuple[Piece, ...]
    needs: str = ""

    def holds(self, arch: ArchConfig) -> bool:
        """Whether a model of this architecture has the tensor."""
        flag = self.needs.removeprefix("not ")
        return not flag or getattr(arch, flag) is (flag == self.needs)


def _whole(native: str, hf: str, gguf: str, dims: str, needs: str = "") -> Rule:
    return Rule(native, (Piece(hf, gguf, dims),), needs)


def _fused_qkv(native: str, kind: str, tail: str, needs: str = "") -> Rule:
    """Query heads of the group, then the key head, then the value head, for each key/value head."""
    hf, gguf = _HF_LAYER + "self_attn.{}_proj." + kind, _GGUF_LAYER + "attn_{}." + kind

    def piece(letter: str, heads: str, part: int | slice, rotary: bool) -> Piece:
        # str.format would also look at {layer}, which is filled in later.
        names = hf.replace("{}", letter), gguf.replace("{}", letter)
        return Piece(*names, f"({heads} head_dim){tail}", (slice(None), part), rotary)

    pieces = (
        piece("q", "kv_heads group", slice(None, -2), True),
        piece("k", "kv_heads", -2, True),
        piece("v", "kv_heads", -1, False),
    )
    return Rule(_LAYER + native, pieces, needs)


LLAMA_LIKE = (
    _whole("embed.table", "model.embed_tokens.weight", "token_embd.weight", "vocab embed"),
    _whole(
        _LAYER + "attention_norm.scale",
        _HF_LAYER + "input_layernorm.weight",
        _GGUF_LAYER + "attn_norm.weight",
        "embed",
    ),
    _fused_qkv("attention.qkv", "weight", " embed"),
    _fused_qkv("attention.qkv_bias", "bias", "", needs="qkv_bias"),
    _whole(
        _LAYER + "attention.q_norm.scale",
        _HF_LAYER + "self_attn.q_norm.weight",
        _GGUF_LAYER + "attn_q_norm.weight",
        "head_dim",
        needs="qk_norm",
    ),
    _whole(
        _LAYER + "attention.k_norm.scale",
        _HF_LAYER + "self_attn.k_norm.weight",
        _GGUF_LAYER + "attn_k_norm.weight",
        "head_dim",
        needs="qk_norm",
    ),
    _whole(
        _LAYER + "attention.out",
        _HF_LAYER + "self_attn.o_proj.weight",
        _GGUF_LAYER + "attn_output.weight",
        "embed (q_heads head_dim)",
    ),
    _whole(
        _LAYER + "attention.out_bias",
        _HF_LAYER + "self_attn.o_proj.bias",
        _GGUF_LAYER + "attn_output.bias",
        "embed",
        needs="out_bias",
    ),
    _whole(
        _LAYER + "mlp_norm.scale",
        _HF_LAYER + "post_attention_layernorm.weight",
        _GGUF_LAYER + "ffn_norm.weight",
        "embed",
    ),
    Rule(
        _LAYER + "mlp.gate_up",
        (
            Piece(
                _HF_LAYER + "mlp.gate_proj.weight",
                _GGUF_LAYER + "ffn_gate.weight",
                "mlp embed",
                (0,),
            ),
            Piece(
                _HF_LAYER + "mlp.up_proj.weight", _GGUF_LAYER + "ffn_up.weight", "mlp embed", (1,)
            ),
        ),
    ),
    _whole(
        _LAYER + "mlp.down",
        _HF_LAYER + "mlp.down_proj.weight",
        _GGUF_LAYER + "ffn_down.weight",
        "embed mlp",
    ),
    _whole("norm.scale", "model.norm.weight", "output_norm.weight", "embed"),
    _whole("unembed.table", "lm_head.weight", "output.weight", "vocab embed", needs="not tied"),
)


def rules_for(arch: ArchConfig, rules: tuple[Rule, ...] = LLAMA_LIKE) -> Iterator[Rule]:
    """The rules of one architecture with the layers written out, in the model's order."""
    layered = [rule for rule in rules if "{layer}" in rule.native and rule.holds(arch)]
    outer = [rule for rule in rules if "{layer}" not in rule.native and rule.holds(arch)]
    yield outer[0]
    for layer in range(arch.layers):
        for rule in layered:
            yield Rule(
                rule.native.format(layer=layer),
                tuple(_of_layer(piece, layer) for piece in rule.pieces),
            )
    yield from outer[1:]


def _of_layer(piece: Piece, layer: int) -> Piece:
    names = piece.hf.format(layer=layer), piece.gguf.format(layer=layer)
    return Piece(*names, piece.dims, piece.at, piece.rotary)


def widest(dtypes: list[np.dtype]) -> np.dtype:
    """The one dtype, or float32 where fused pieces are stored in different ones.

    float32 holds every bfloat16 and float16 exactly, so fusing never loses a bit.
    """
    return dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)
