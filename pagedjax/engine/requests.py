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


@dataclass(slots=True, kw_only=True)
class Completion:
    """One of a request's `n` samples: a sequence of the scheduler's.

    News gathers here until a delta takes it, after every step or at the end of the request.

    Attributes:
        key: the sequence's name in the scheduler.
        index: which of the samples.
        record: its row in the engine's sampling records.
        text: turns tokens into text; None for an engine without a tokenizer.
        token_ids: all that have been told, int32.
        num_taken: how many of them deltas have had.
        logprobs: of those after them, if asked for.
        num_spoken: how many tokens are in the text, which falls behind where nobody reads it.
        news: text that no delta has had.
        finish_reason: None while it goes on.
        stop_reason: as in `CompletionOutput`.
        score: likewise.
        end_taken: whether a delta has told of the end.
    """

    key: str
    index: int
    record: int
    text: TextStream | None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_taken: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_spoken: int = 0
    news: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    end_taken: bool = False

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Nothing more will come."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def speak(self) -> None:
        """Put tokens into words that have not been; a stop string in them ends it.

        A stop token is silent, unless what stops the text is to be part of it.
        """
        text = self.text
        if text is None:
            return
        end = len(self.token_ids)
        if isinstance(self.stop_reason, int) and not text.keeps_stop:
            end -= 1
        if end > self.num_spoken:
            said, stop_string = text.push(self.token_ids[self.num_spoken : end])
            self.news += said
            self.num_spoken = end
            if stop_string is not None:
                self.end("stop", stop_string)

    def take(self) -> CompletionOutput | None:
        """What has come since the last time, or None if nothing has."""
        start, end = self.num_taken, len(self.token_ids)
        has_ended = self.finish_reason is not None
        if start == end and self.end_taken == has_ended:
            return None
        if self.text is not None:
            self.speak()
            if has_ended:
                self.news += self.text.flush()
        output = completion_output(
            self.index,
            self.news,
            tuple(self.token_ids[start:]),
            tuple(self.logprobs) if self.logprobs else None,
            self.finish_reason,
            self.stop_reason,
            self.score,
        )
        self.num_taken, self.news, self.end_taken = end, "", has_ended
        self.logprobs.clear()
        return output

    def retell(self) -> CompletionOutput:
        """What it had told before it was restored, which may be nothing; the next delta follows."""
        return self.take() or CompletionOutput(index=self.index, text="", token_ids=())

    def tell_result(self, result: Hypothesis, stopped: bool) -> None:
        """Tell a whole result of a beam search, which ended by itself or at its length limit."""
        self.token_ids.extend(result.token_ids)
        self.score = result.score
        self.end("stop" if stopped else "length", result.token_ids[-1] if stopped else None)


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """A request between `add_request` and its last output; `beams` if it searches.

    Attributes:
        is_streamed: whether its news is wanted after every step, and not only at its end.
        is_quiet: whether nobody has to look at its tokens before one of its completions ends.
        told_first: whether the None of the first prompt token is among the news.
    """

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
    told_first: bool = False
    is_streamed: bool = True
    is_quiet: bool = False

    def begin(self, time: float, num_cached_tokens: int) -> None:
        """A token of it is there; what follows is for the first one."""
        if self.timings.first_token is not None:
            return
        self.stamp(first_token=time)
        self.num_cached_tokens = num_cached_tokens
        self.begin_prompt_news()
        params = self.params
        self.is_quiet = not (
            self.is_streamed or self.beams is not None or params.stop or params.logprobs is not None
        )

    @property
    def has_ended(self) -> bool:
        """Whether all its completions have."""
        return self.timings.finished is not None

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
            output = completion.take()
            if output is not None:
                news.append(output)
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
