"""The named shapes as transformers models with random weights, and kernels for its paged cache."""

from __future__ import annotations

import gc
from typing import Any

from pagedjax.models import ArchConfig


def torch_device() -> str:
    """`cuda` where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Name of the GPU, or `cpu`."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int | None:
    """Most GPU memory that PyTorch has reserved since `forget_peak`; None on a CPU."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def forget_peak() -> None:
    """Return unused memory and count the peak from here on."""
    import torch

    gc.collect()  # what refers to itself, as servers do
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def hugging_face_model(arch: ArchConfig, dtype: str) -> Any:
    """A transformers model of this shape on the GPU or CPU, its random weights made there.

    Raises:
        ValueError: a shape that is neither plain Llama nor Qwen 3.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    families = {
        "llama": (LlamaConfig, LlamaForCausalLM, False),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, True),
    }
    config_class, model_class, qk_norm = families.get(arch.family, (None, None, None))
    if qk_norm is not arch.qk_norm or arch.qkv_bias or arch.out_bias or any(arch.windows):
        raise ValueError(f"want a plain llama or qwen3 shape, got {arch}")
    config = config_class(
        vocab_size=arch.vocab, hidden_size=arch.embed, intermediate_size=arch.mlp,
        num_hidden_layers=arch.layers, num_attention_heads=arch.q_heads,
        num_key_value_heads=arch.kv_heads, head_dim=arch.head_dim, rms_norm_eps=arch.norm_eps,
        max_position_embeddings=arch.max_positions, tie_word_embeddings=arch.tied,
        rope_parameters=rope_parameters(arch), bos_token_id=0, eos_token_id=None, pad_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(torch_device()):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, dtype)).eval().requires_grad_(False)


def rope_parameters(arch: ArchConfig) -> dict[str, Any]:
    """The rotary embedding in transformers' words."""
    scaling = arch.rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": arch.rope.theta}
    return {
        "rope_type": "llama3",
        "rope_theta": arch.rope.theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def use_torch_varlen() -> str:
    """Give transformers' paged FlashAttention path PyTorch's own build of the kernel.

    The path otherwise wants the flash-attn package. PyTorch's kernel reads gathered keys; one that
    reads through block tables is not among the pieces it gets, so decode steps gather too.

    Returns:
        The attention implementation to configure.
    """
    import transformers.modeling_flash_attention_utils as flash
    from torch.nn.attention import varlen

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
        causal=True, window_size=(-1, -1),
    ):  # fmt: skip
        if tuple(window_size) != (-1, -1) or not causal:
            raise ValueError(f"want full causal attention, got {causal=}, {window_size=}")
        # PyTorch 2.11 and older do not know the option, and take equal numbers of heads only.
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        return varlen.varlen_attn(
            q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k),
            scale=softmax_scale, window_size=(-1, 0), **grouped,
        )  # fmt: skip

    def kernels(implementation, attention_wrapper=None, allow_all_kernels=False):
        function = flash_attn_varlen_func
        return function, function, None, flash._pad_input, flash._unpad_input

    flash._lazy_imports = kernels
    flash._loaded_implementation = None
    return "paged|flash_attention_2"
