"""What a request must be before it is queued."""

from __future__ import annotations

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.plan import Int32
from scheduler.request import Request
from scheduler.sequence import Sequence


def checked_prompt(request: Request, config: SchedulerConfig) -> Int32:
    """The prompt of a request as a read-only array, int32[prompt_len].

    Raises:
        ValueError: it is empty, holds something other than int32 token ids, or leaves no room for
            an output token.
    """
    prompt = np.asarray(request.prompt_token_ids)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(
            f"request {request.request_id!r}: a prompt is a flat list of at least one token, "
            f"got shape {prompt.shape}"
        )
    if prompt.dtype.kind not in "iu":
        raise ValueError(
            f"request {request.request_id!r}: token ids are integers, got {prompt.dtype}"
        )
    top = np.iinfo(np.int32).max
    if prompt.min() < 0 or prompt.max() > top:
        raise ValueError(
            f"request {request.request_id!r}: token ids are from 0 to {top}, got "
            f"{prompt.min()} to {prompt.max()}"
        )
    if prompt.size >= config.max_seq_len:
        which = (
            f"the model's limit of {config.max_model_len} tokens"
            if config.max_model_len <= config.pool_tokens
            else f"the KV pool of {config.num_blocks - 1} blocks of {config.block_size} tokens"
        )
        raise ValueError(
            f"request {request.request_id!r}: the prompt has {prompt.size} tokens, at most "
            f"{config.max_seq_len - 1} leave room for an output token in {which}"
        )
    prompt = prompt.astype(np.int32)
    prompt.flags.writeable = False
    return prompt


def check_siblings(request: Request, prompt: Int32, sibling: Sequence | None) -> None:
    """A request and the live sequence that it names as its sibling have the same prefix.

    Raises:
        ValueError: there is no such sequence, or it has another prompt or salt.
    """
    who = f"request {request.request_id!r}: its sibling {request.sibling_of!r}"
    if sibling is None:
        raise ValueError(f"{who} is not live")
    salts = [sorted(r.cache_salt) for r in (request, sibling.request)]
    if salts[0] != salts[1] or not np.array_equal(sibling.prompt, prompt):
        raise ValueError(f"{who} has another prompt or salt")
