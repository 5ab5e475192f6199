"""What Llama, Mistral, Qwen 2 and Qwen 3 configurations share."""

from __future__ import annotations

from typing import Any

from convert.hf_config import Fields
from convert.rope_fields import take_rope
from convert.source import CheckpointError
from pagedjax.models.arch import ArchConfig

# Fields that say nothing about the maths of a forward pass. Ids and sampling defaults are read
# by `convert.generation_fields`; attention_dropout acts in training only; pretraining_tp is how
# the training split its matrix products.
IGNORED = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "attention_dropout", "bos_token_id",
    "chunk_size_feed_forward", "do_sample", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_llama_config", "label2id", "max_new_tokens", "min_p",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "repetition_penalty", "return_dict", "temperature", "tokenizer_class",
    "top_k", "top_p", "torch_dtype", "transformers.js_config", "transformers_version",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip

MAX_LAYERS = 10_000  # beyond it a damaged file is likelier, and listing the tensors takes gigabytes


def read_llamalike(
    hf: Fields,
    family: str,
    *,
    windows: tuple[int | None, ...],
    head_dim_default: int | None = None,
    kv_heads_required: bool = True,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> ArchConfig:
    """Read the common fields of a `config.json` and finish it.

    Args:
        hf: the configuration; the family has taken its own fields already.
        family: `model_type`, for `ArchConfig.family`.
        windows: sliding window per layer.
        head_dim_default: head width when the field is absent; None for embed / q_heads.
        kv_heads_required: False where a model without the field has a key/value head per query
            head; elsewhere transformers would assume some other model's number.
        qkv_bias: as in `ArchConfig`, like the two that follow.
        out_bias: idem.
        qk_norm: idem.

    Raises:
        CheckpointError: a field is absent, malformed, unsupported or not understood.
    """
    # The one feed-forward nonlinearity of these families; transformers knows both names for it.
    hf.require("hidden_act", "silu", "swish")
    hf.require("mlp_bias", False)
    embed, q_heads = hf.take_int("hidden_size"), hf.take_int("num_attention_heads")
    max_positions = hf.take_int("max_position_embeddings")
    head_dim = hf.take_int("head_dim", head_dim_default)
    if head_dim is None:
        if q_heads < 1 or embed % q_heads:
            raise CheckpointError(
                f"{hf.where}: no head_dim, and hidden_size {embed} is not a multiple of "
                f"{q_heads} heads"
            )
        head_dim = embed // q_heads
    kv_optional = not kv_heads_required or hf.states("num_key_value_heads")
    values: dict[str, Any] = {
        "vocab": hf.take_int("vocab_size"),
        "layers": len(windows),
        "kv_heads": hf.take_int("num_key_value_heads", *([q_heads] if kv_optional else [])),
        "mlp": hf.take_int("intermediate_size"),
        "norm_eps": hf.take_float("rms_norm_eps"),
        "rope": take_rope(hf, max_positions),
        "tied": hf.take_bool("tie_word_embeddings", False),
    }
    hf.finish(IGNORED)
    try:
        return ArchConfig(
            family=family,
            embed=embed,
            q_heads=q_heads,
            head_dim=head_dim,
            max_positions=max_positions,
            windows=windows,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=qk_norm,
            **values,
        )
    except ValueError as error:
        raise CheckpointError(f"{hf.where}: {error}") from error


def take_layers(hf: Fields, name: str = "num_hidden_layers") -> int:
    """Number of decoder layers.

    Raises:
        CheckpointError: it is absent, or out of any reason.
    """
    layers = hf.take_int(name)
    if not 1 <= layers <= MAX_LAYERS:
        raise CheckpointError(f"{hf.where}: {name} must be 1 to {MAX_LAYERS}, got {layers}")
    return layers


def take_qwen_windows(hf: Fields, layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen 2 and 3: off unless `use_sliding_window`, then from one layer upwards.

    `layer_types` names each layer's kind where it is given; else the layers from
    `max_window_layers` on slide (transformers' `Qwen2Config`).

    Raises:
        CheckpointError: a layer slides without a window, or has a kind that is not known.
    """
    uses = hf.take_bool("use_sliding_window", False)
    window = hf.take_int("sliding_window", 4096)
    first = hf.take_int("max_window_layers", 28)
    kinds = hf.take("layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if uses and i >= first else "full_attention"
                 for i in range(layers)]  # fmt: skip
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise CheckpointError(
            f"{hf.where}: layer_types must give one of {known} for each of {layers} layers, "
            f"got {kinds}"
        )
    if not uses and "sliding_attention" in kinds:
        raise CheckpointError(f"{hf.where}: layer_types slide, but use_sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
