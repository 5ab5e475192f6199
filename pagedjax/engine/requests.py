"""What the engine remembers of a request while it lives, and how its news is put into words."""

from __future__ import annotations

import dataclasses
from array import array
from dataclasses import dataclass, field

from pagedjax.engine.beam_search import BeamSearch, Hypothesis
from pagedjax.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    Timings,
    TokenLogprobs,
    completion_output,
    request_output,
)
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import TextStream
from scheduler import FinishReason as StopReason
from scheduler import SeqUpdate


@dataclass(slots=True, kw_only=True)
class Completion:
    """One of a request's `n` samples: a sequence of the scheduler's.

    Attributes:
        key: the sequence's name in the scheduler.
        index: which of the samples.
        record: its row in the engine's sampling records.
        text: turns tokens into text; None for an engine without a tokenizer.
        token_ids: all that have been told, int32.
        finish_reason: None while it goes on.
        stop_reason: as in `CompletionOutput`.
        news: what has come since the last delta.
    """

    key: str
    index: int
    record: int
    text: TextStream | None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    news: CompletionOutput | None = None

    def tell(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None = None,
        score: float | None = None,
    ) -> None:
        """Add to the news. A completion has news at most once a step, and once at its end."""
        assert self.news is None
        for token_id in token_ids:  # mostly one, for which `extend` takes longer
            self.token_ids.append(token_id)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        self.news = completion_output(
            self.index, text, token_ids, logprobs, finish_reason, stop_reason, score
        )

    def tell_update(
        self,
        update: SeqUpdate,
        params: SamplingParams,
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> bool:
        """Put new tokens into words.

        Returns:
            Whether a stop string in them ends what would go on otherwise.
        """
        ended, reason = update.finish_reason is not None, update.finish_reason
        text, stop_string = "", None
        if self.text is not None:
            silent = update.stop_token_id is not None and not params.include_stop_str_in_output
            if not silent:
                text, stop_string = self.text.push(update.new_token_ids)
            if stop_string is not None:
                reason = StopReason.STOP
            if reason is not None:
                text += self.text.flush()
        self.tell(
            text,
            update.new_token_ids,
            logprobs,
            reason.value if reason is not None else None,
            stop_string if stop_string is not None else update.stop_token_id,
        )
        return stop_string is not None and not ended

    def retell(self, params: SamplingParams) -> CompletionOutput:
        """All that has been told, without log-probabilities; a fresh `text` comes to that point."""
        text, ended = "", self.finish_reason is not None
        if self.text is not None:
            by_token = ended and isinstance(self.stop_reason, int)
            silent = by_token and not params.include_stop_str_in_output
            text, _ = self.text.push(self.token_ids[:-1] if silent else self.token_ids)
            if ended:
                text += self.text.flush()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def tell_result(self, result: Hypothesis, stopped: bool) -> None:
        """Tell a whole result of a beam search, which ended by itself or at its length limit."""
        text, tokens = "", list(result.token_ids)
        if self.text is not None:
            text, _ = self.text.push(tokens[:-1] if stopped else tokens)
            text += self.text.flush()
        self.tell(
            text,
            result.token_ids,
            None,
            "stop" if stopped else "length",
            tokens[-1] if stopped else None,
            score=result.score,
        )


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """A request between `add_request` and its last output; `beams` if it searches."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    timings: Timings
    beams: BeamSearch | None = None
    completions: list[Completion] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_news: list[TokenLogprobs | None] = field(default_factory=list)
    told_first: bool = False  # whether the None of the first prompt token is among the news

    def begin_prompt_news(self) -> None:
        """Tell the first prompt token, which nothing predicts, before anything else."""
        if self.params.prompt_logprobs is not None and not self.told_first:
            self.prompt_news.append(None)
            self.told_first = True

    def tell_prompt(self, logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the next prompt token to the news."""
        self.begin_prompt_news()
        self.prompt_news.append(logprobs)

    def stamp(self, **times: float) -> None:
        """Set timings that are not set yet."""
        unset = {k: v for k, v in times.items() if getattr(self.timings, k) is None}
        if unset:
            self.timings = dataclasses.replace(self.timings, **unset)

    def take_delta(self) -> RequestOutput | None:
        """What is new since the last call, or None when nothing is."""
        news: list[CompletionOutput] = []
        finished = True
        for completion in self.completions:
            if completion.news is not None:
                news.append(completion.news)
                completion.news = None
            if completion.finish_reason is None:
                finished = False
        if not news and not self.prompt_news:
            return None
        wants_prompt = self.params.prompt_logprobs is not None
        delta = request_output(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            tuple(self.prompt_news) if wants_prompt else None,
            tuple(news),
            self.num_cached_tokens,
            self.timings,
            finished,
        )
        if wants_prompt:
            self.prompt_news.clear()
        return delta


@dataclass(frozen=True, slots=True)
class PromptTarget:
    """A sampled row that reports on a prompt token instead of drawing a new one.

    Attributes:
        request: whose prompt.
        row: index among the step's sampled rows.
        position: of the prompt token that the row predicts.
    """

    request: LiveRequest
    row: int
    position: int

    @property
    def token_id(self) -> int:
        """The prompt token that the row predicts."""
        return self.request.prompt_token_ids[self.position]
