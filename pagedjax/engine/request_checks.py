"""What a request must be before the engine queues it."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import numpy as np

from pagedjax.sampling_params import SamplingParams


def check_request_id(request_id: str) -> None:
    """Refuse what cannot name a request.

    Raises:
        ValueError: it is no string.
    """
    if not isinstance(request_id, str):
        raise ValueError(f"a request id is a string, got {request_id!r}")


def checked_tokens(token_ids: Sequence[int], vocab: int) -> np.ndarray:
    """A prompt as a flat array of integers, of at least one.

    Args:
        token_ids: what the model is to read.
        vocab: token ids are below.

    Raises:
        ValueError: it is empty, or holds something else than token ids.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise ValueError(f"a prompt is a flat list of token ids, got shape {ids.shape}")
    if not ids.size:
        raise ValueError("the prompt is empty; at least one token is needed")
    wanted = f"token ids must be integers in 0 .. {vocab - 1}"
    if ids.dtype.kind not in "iu":  # an id beyond 64 bits makes an array of objects
        raise ValueError(f"{wanted}, got {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"{wanted}, got {low if low < 0 else high}")
    return ids


def checked_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    priority: int,
    vocab: int,
    max_logprobs: int,
    has_tokenizer: bool,
) -> tuple[int, ...]:
    """The prompt as plain integers, if the request can be served as far as is seen here.

    Args:
        prompt_token_ids: what the model is to read.
        params: how to sample and when to stop.
        priority: when it is served.
        vocab: token ids are below.
        max_logprobs: most alternatives per token that a step reports.
        has_tokenizer: whether tokens can be turned into text, which stop strings need.

    Raises:
        ValueError: it cannot be served.
    """
    if not isinstance(priority, numbers.Integral) or isinstance(priority, bool):
        raise ValueError(f"a priority must be an integer, got {priority!r}")
    ids = checked_tokens(prompt_token_ids, vocab)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > max_logprobs:
            raise ValueError(f"{name} is {wanted}, the engine reports at most {max_logprobs}")
    if params.stop and not has_tokenizer:
        raise ValueError(f"stop strings need a tokenizer, got {params.stop!r} without one")
    outside = [i for i in params.stop_token_ids if i >= vocab]
    if outside:
        raise ValueError(f"stop_token_ids must be below {vocab}, got {outside}")
    return tuple(ids.tolist())
