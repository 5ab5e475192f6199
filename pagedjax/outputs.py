"""What comes back from the engine: text, tokens, log-probabilities, reasons and times.

The engine speaks in *deltas*: each step it emits, for every request with news, a `RequestOutput`
that holds only what is new since the last one. `RequestOutput.extended` puts two together, so the
concatenation of all deltas of a request is its whole result. `AsyncLLM.generate` streams the
deltas; `LLM.generate` asks for a single one, when a request has ended, that holds it all.

A frozen dataclass takes a microsecond to make, most of it for getting past its own lock field by
field, and there are two in every token of every request. `completion_output` and `request_output`
make equal ones in a fifth of that: they fill an object without the lock and then change its class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort", "error"]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw distribution the model gave.

    They are natural logarithms, computed in float32 before temperature and every other
    restriction of sampling.

    Attributes:
        token_id: the token that stands at this position.
        logprob: its log-probability.
        top: `(token_id, logprob)` of the most probable tokens, best first, as many as asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt, or what is new of it.

    Attributes:
        index: which of the `n` completions, from 0.
        text: the text of `token_ids`, never half a character. Text that may turn out to be the
            start of a stop string is held back, so a delta can have tokens and no text.
        token_ids: generated tokens; a stop token that ended the text is the last of them.
        logprobs: one entry per token, or None if not asked for.
        finish_reason: None while it goes on; `stop` by an end-of-text token, a stop token or a
            stop string; `length` by `max_tokens` or the engine's length limit; `abort` by the
            caller; `error` if it failed.
        stop_reason: the stop token's id or the stop string behind `stop`; None otherwise.
        score: of a beam search: the sum of the log-probabilities over the length to the power of
            the length penalty; None otherwise.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When things happened to a request, in seconds of `time.monotonic`; None: not yet.

    Attributes:
        arrived: the request was handed to the engine.
        scheduled: it was first part of a step.
        first_token: its first generated token reached the host.
        finished: the last of its completions ended.
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queued(self) -> float | None:
        """Seconds from arrival to the first step, or None."""
        return None if self.scheduled is None else self.scheduled - self.arrived

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first generated token, or None."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def total(self) -> float | None:
        """Seconds from arrival to the end, or None."""
        return None if self.finished is None else self.finished - self.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request's result so far, or a delta of it (see the module's docstring).

    Attributes:
        request_id: the caller's or the engine's name for the request.
        prompt: the prompt's text, or None if it came as token ids.
        prompt_token_ids: the prompt as the model saw it; deltas repeat it.
        prompt_logprobs: one entry per prompt token, the first None since nothing predicts it;
            None if not asked for. A delta holds the entries computed since the last one.
        outputs: completions by `index`; a delta names only those with news.
        num_cached_tokens: prompt tokens whose keys and values were already in the cache.
        timings: when things happened, as far as they have.
        finished: whether nothing more will come.
        error: why the request failed, or None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    outputs: tuple[CompletionOutput, ...] = ()
    num_cached_tokens: int = 0
    timings: Timings
    finished: bool = False
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated, over all completions."""
        return sum([len(output.token_ids) for output in self.outputs])

    @classmethod
    def failed(
        cls,
        error: str,
        *,
        request_id: str,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] = (),
        timings: Timings,
        num_completions: int = 1,
    ) -> RequestOutput:
        """The output of a request that ends with `error`; as a delta it adds no text."""
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(prompt_token_ids),
            outputs=tuple(
                CompletionOutput(index=index, text="", token_ids=(), finish_reason="error")
                for index in range(num_completions)
            ),
            timings=timings,
            finished=True,
            error=error,
        )

    @classmethod
    def joined(cls, deltas: Sequence[RequestOutput]) -> RequestOutput:
        """The concatenation of a request's deltas, in the order they came.

        Raises:
            ValueError: there are none, they belong to different requests, or one follows the end.
        """
        if not deltas:
            raise ValueError("a request's output needs at least one delta, got none")
        first, last = deltas[0], deltas[-1]
        for delta in deltas[1:]:
            if delta.request_id != first.request_id:
                raise ValueError(
                    f"deltas of one request wanted, got {first.request_id!r}, {delta.request_id!r}"
                )
        if any(delta.finished for delta in deltas[:-1]):
            raise ValueError(f"request {first.request_id!r} goes on after it finished")
        parts: dict[int, list[CompletionOutput]] = {}
        for delta in deltas:
            for output in delta.outputs:
                parts.setdefault(output.index, []).append(output)
        return dataclasses.replace(
            last,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=_concatenated(delta.prompt_logprobs for delta in deltas),
            outputs=tuple(_joined_completion(parts[index]) for index in sorted(parts)),
            num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
            error=next((delta.error for delta in deltas if delta.error is not None), None),
        )

    def extended(self, delta: RequestOutput) -> RequestOutput:
        """This output with a later delta added to its end.

        Raises:
            ValueError: `delta` is another request's, or this one has finished.
        """
        return self.joined((self, delta))


class _CompletionDraft:
    __slots__ = CompletionOutput.__slots__


class _RequestDraft:
    __slots__ = RequestOutput.__slots__


def completion_output(
    index: int,
    text: str,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...] | None,
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
    score: float | None,
) -> CompletionOutput:
    """A `CompletionOutput`, made fast."""
    draft: Any = _CompletionDraft()
    draft.index = index
    draft.text = text
    draft.token_ids = token_ids
    draft.logprobs = logprobs
    draft.finish_reason = finish_reason
    draft.stop_reason = stop_reason
    draft.score = score
    draft.__class__ = CompletionOutput
    return draft


def request_output(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: tuple[int, ...],
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None,
    outputs: tuple[CompletionOutput, ...],
    num_cached_tokens: int,
    timings: Timings,
    finished: bool,
) -> RequestOutput:
    """A `RequestOutput` without error, made fast."""
    draft: Any = _RequestDraft()
    draft.request_id = request_id
    draft.prompt = prompt
    draft.prompt_token_ids = prompt_token_ids
    draft.prompt_logprobs = prompt_logprobs
    draft.outputs = outputs
    draft.num_cached_tokens = num_cached_tokens
    draft.timings = timings
    draft.finished = finished
    draft.error = None
    draft.__class__ = RequestOutput
    return draft


def _joined_completion(parts: list[CompletionOutput]) -> CompletionOutput:
    return dataclasses.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=_concatenated(part.logprobs for part in parts),
    )


def _concatenated(parts: Iterable[tuple[_Item, ...] | None]) -> tuple[_Item, ...] | None:
    present = [part for part in parts if part is not None]
    return tuple(item for part in present for item in part) if present else None
