"""What a caller may ask of a generation: sampling, stopping, and the log-probabilities reported."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pagedjax.models.generation import GenerationDefaults

MAX_COMPLETIONS = 256
MAX_LOGPROBS = 20
MAX_STOP_RULES = 256
MAX_TEMPERATURE = 1e6
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one prompt's completions, and when to stop. Checks itself when it is made.

    Every restriction is applied to the distribution that the one before it left: penalties,
    temperature, then `top_k`, `top_p` and `min_p`.

    >>> SamplingParams(temperature=0, max_tokens=32, stop="\\n\\n").stop
    ('\\n\\n',)

    Attributes:
        n: completions of the prompt, 1 to 256, which is computed once for all of them.
        temperature: divides the logits, at most 1e6; 0 takes the most probable token (the lowest
            id of equals).
        top_k: sample among the `top_k` most probable tokens; 0 and -1 mean all of them, as does
            a number above the vocabulary's size.
        top_p: sample among the fewest tokens whose probabilities add up to `top_p`; 1 means all.
        min_p: drop tokens less probable than `min_p` times the most probable one; 0 drops none.
        repetition_penalty: divides the logits above 0, and multiplies those below, of all tokens
            that are in the prompt or have been generated; 0.01 to 100, 1 is none.
        presence_penalty: subtracted from the logits of the tokens that have been generated; -2 to
            2, 0 is none. The prompt does not count.
        frequency_penalty: the same, as often as a token has been generated.
        seed: makes the draws repeatable, whatever else runs at the time; None takes a fresh one.
        max_tokens: tokens to generate at most; None means until the text ends by itself or the
            engine's length limit.
        min_tokens: no end-of-text token, stop token or stop string ends the text before this
            many tokens.
        stop: a string, or several, whose appearance in the text ends it; stored as a tuple.
            Of several, the first to be complete counts, and of those the longest.
        stop_token_ids: token ids that end the text, besides the checkpoint's own end-of-text
            ids; they do so even under `ignore_eos`. Stored as a tuple.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the text.
        ignore_eos: go on after the checkpoint's end-of-text ids.
        logprobs: report the log-probability of each chosen token and of this many of the most
            probable ones, 0 to 20; None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: leave control tokens such as `<|im_end|>` out of the text.
        cache_salt: cached prefixes are shared only between requests with the same salt, so that
            nobody outside can tell by the time taken what has been asked before; None shares with
            all that have none.

    Raises:
        ValueError: a field has an impossible type or value; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self._store("n", _integer("n", self.n, 1, MAX_COMPLETIONS))
        self._store("temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        self._store("top_k", _integer("top_k", self.top_k, -1, None))
        self._store("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        self._store("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        for name, low, high in (
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            self._store(name, _number(name, getattr(self, name), low, high))
        self._store("min_tokens", _integer("min_tokens", self.min_tokens, 0, _MAX_INT32))
        for name, low, high in (
            ("seed", 0, 2**32 - 1),
            ("max_tokens", 1, _MAX_INT32),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._store(name, _integer(name, getattr(self, name), low, high, "None or "))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt must be None or a string, got {self.cache_salt!r}")
        self._store("stop", _stop_strings(self.stop))
        self._store("stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def is_penalized(self) -> bool:
        """Whether what has been said changes what is drawn."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    def salt_pairs(self) -> tuple[tuple[str, str], ...]:
        """`cache_salt` as the scheduler takes it, apart from salts of other kinds."""
        return () if self.cache_salt is None else (("cache_salt", self.cache_salt),)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_generation(cls, defaults: GenerationDefaults, **changes: Any) -> SamplingParams:
        """The checkpoint's own settings: greedy unless it says `do_sample`; `changes` win.

        Args:
            defaults: what the checkpoint's `generation_config.json` says.
            **changes: fields of `SamplingParams` that replace or add to those settings.

        Raises:
            ValueError: the checkpoint or `changes` holds an impossible value.
        """
        names = ["repetition_penalty"]
        if defaults.do_sample:
            names += ["temperature", "top_k", "top_p", "min_p"]
        settings: dict[str, Any] = {} if defaults.do_sample else {"temperature": 0.0}
        stated = {name: getattr(defaults, name) for name in names}
        settings |= {name: value for name, value in stated.items() if value is not None}
        return cls(**{**settings, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search for likely completions of one prompt. Checks itself when it is made.

    >>> BeamSearchParams(beam_width=4, max_tokens=32).length_penalty
    1.0

    Attributes:
        beam_width: hypotheses that are followed at the same time, and completions returned, best
            first.
        max_tokens: tokens of a completion at most; the engine's length limit is another bound.
        length_penalty: a completion's score is the sum of its log-probabilities divided by its
            length to this power, so that more than 0 favours longer ones.
        early_stopping: True ends the search with `beam_width` completions; False when the best
            hypothesis would not beat the worst of them if it ended now; "never" when it could
            not at any length.
        ignore_eos: go on after the checkpoint's end-of-text ids.
        skip_special_tokens: leave control tokens such as `<|im_end|>` out of the text.
        cache_salt: as in `SamplingParams`.

    Raises:
        ValueError: a field has an impossible type or value; the message names it.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        store = object.__setattr__
        store(self, "beam_width", _integer("beam_width", self.beam_width, 1, MAX_COMPLETIONS))
        store(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, _MAX_INT32))
        store(self, "length_penalty", _number("length_penalty", self.length_penalty, -5, 5))
        # Not by `in`: 1 is equal to True, but a search asks which it is.
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}"
            )
        self.sampling(num_candidates=1)

    @property
    def n(self) -> int:
        """Completions returned."""
        return self.beam_width

    def sampling(self, num_candidates: int) -> SamplingParams:
        """What each beam asks of a step: its likeliest continuations.

        Raises:
            ValueError: a step does not report so many.
        """
        if num_candidates > MAX_LOGPROBS:
            raise ValueError(
                f"a beam_width of {self.beam_width} needs the {num_candidates} likeliest tokens of "
                f"each position, a step reports at most {MAX_LOGPROBS}"
            )
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=num_candidates,
            skip_special_tokens=self.skip_special_tokens,
            cache_salt=self.cache_salt,
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _integer(name: str, value: Any, low: int, high: int | None, alternative: str = "") -> int:
    """`value` as an int (numpy's integers count, booleans do not), within `low ..= high`."""
    if not _is_integer(value) or value < low or (high is not None and value > high):
        wanted = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} must be {alternative}an integer, {wanted}; got {value!r}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    """`value` as a float within `low ..= high`; NaN fails both comparisons and is refused."""
    if not _is_real(value) or not low <= value <= high:
        raise ValueError(f"{name} must be a number, {low:g} to {high:g}; got {value!r}")
    return float(value)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold strings that are not empty, got {string!r}")
    return strings


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    items = _as_tuple("stop_token_ids", ids, "token ids")
    return tuple(_integer("each of stop_token_ids", item, 0, _MAX_INT32) for item in items)


def _as_tuple(name: str, items: Any, of_what: str) -> tuple[Any, ...]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise ValueError(f"{name} must be a list or tuple of {of_what}, got {items!r}")
    if len(items) > MAX_STOP_RULES:
        raise ValueError(f"{name} holds at most {MAX_STOP_RULES} {of_what}, got {len(items)}")
    return tuple(items)
