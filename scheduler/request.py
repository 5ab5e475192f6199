"""What a caller asks for: a prompt, when to stop, and how an answer can end."""

from __future__ import annotations

import enum
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a request ended by itself.

    STOP: a stop token was sampled.
    LENGTH: `max_tokens` or the longest sequence that model and pool allow was reached.
    """

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a sequence ends.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: a stop token ends the sequence only when at least this many generated tokens
            come before it.
        stop_token_ids: ids that end the sequence; the end-of-sequence ids are among them unless
            the caller ignores those. The stop token is the last of the generated tokens.

    Raises:
        ValueError: a count is out of range.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), "
                f"got {self.min_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued. Of equal priority, requests are served in order of arrival.

    Attributes:
        request_id: the caller's name for it, unique among the live requests.
        prompt_token_ids: at least one token id; not changed after the request was added.
        stop: when to end.
        priority: a request with a lower value is served earlier, and may take the place or the
            memory of a running one with a higher value.
        prompt_logprobs: whether logits are wanted at every prompt position, so that each prompt
            token takes one sample row of the step that computes it.
        cache_salt: what the keys and values depend on besides the tokens, as (kind, value) pairs:
            an adapter, a tenant, the hash of an image. Prefixes are shared between requests with
            the same pairs, in any order, and no others.
        sibling_of: id of a live request with the same prompt and salt, which is then computed
            once: the sequences share its blocks, and a block that one of them writes to is copied
            first.
        beam: the sequence is a beam of a beam search. Its tokens are not taken from the plans
            but chosen by `Scheduler.choose_beams`, for which it waits after every step. The beams
            of a search are siblings; those after the first wait until they are chosen.
    """

    request_id: str
    prompt_token_ids: AbstractSequence[int] = field(repr=False)
    stop: StopRules
    priority: int = 0
    prompt_logprobs: bool = False
    cache_salt: tuple[tuple[str, str], ...] = ()
    sibling_of: str | None = None
    beam: bool = False
