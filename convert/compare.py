"""The converted model against transformers: logits of one prompt, in float32 on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from convert.native_reader import open_native
from pagedjax.models import decoder_from_params

TOLERANCE = 2e-3
"""Largest logit difference that float32 rounding in two different orders may explain."""

PROMPT_TOKENS = 32


def require_torch() -> None:
    """Make sure that a comparison can run at all.

    Raises:
        RuntimeError: PyTorch, or accelerate beside it, is not installed.
    """
    for name in ("torch", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise RuntimeError(
                f"the check runs the source through transformers, which needs {name}: "
                "pip install 'pagedjax[bench]'"
            )


def largest_difference(src: str | Path, native: str | Path) -> float:
    """Largest absolute difference of the logits after each of a prompt's tokens.

    The weights of both sides are rounded to what the native checkpoint stores, so that what
    remains is the conversion and the maths.

    Args:
        src: the Hugging Face directory or GGUF file that was converted.
        native: the native checkpoint.
    """
    checkpoint = open_native(Path(native))
    cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    # Ids spread over the whole vocabulary; any text would do.
    count = min(PROMPT_TOKENS, checkpoint.arch.max_positions)
    tokens = np.linspace(0, checkpoint.arch.vocab - 1, count).astype(np.int32)
    params = checkpoint.restore("float32", lambda name: cpu)
    model = decoder_from_params(checkpoint.arch, params)
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(model(jax.device_put(tokens[None], cpu)))[0]
    del model, params
    stored = {str(dtype) for dtype in checkpoint.dtypes.values()}
    theirs = transformers_logits(Path(src), tokens, stored.pop() if len(stored) == 1 else None)
    return float(np.max(np.abs(ours - theirs)))


def transformers_logits(src: Path, tokens: np.ndarray, rounded_to: str | None) -> np.ndarray:
    """What transformers computes with eager attention in float32.

    Args:
        src: Hugging Face directory or GGUF file.
        tokens: int32[seq].
        rounded_to: dtype that the weights are rounded to first; None leaves them as stored.

    Returns:
        float32[seq, vocab].
    """
    require_torch()
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    where = (str(src), {}) if src.is_dir() else (str(src.parent), {"gguf_file": src.name})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where[0],
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        **where[1],
    )
    with torch.no_grad():
        if rounded_to is not None:
            # Parameters only: rounding the rotary buffers too would be another model.
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, rounded_to)))
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits
    return logits[0].numpy()
