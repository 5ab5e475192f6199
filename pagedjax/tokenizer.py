"""Text to tokens and back: a checkpoint's tokenizer, its chat template, and streamed text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pagedjax.sampling_params import SamplingParams

Message = Mapping[str, Any]
_REPLACEMENT = "\ufffd"
_MOST_UNDECIDED = 32  # tokens: by then most bytes that form no character will never form one
_STILL_UNDECIDED = 8  # but the last of them may be a beginning


class Tokenizer:
    """A checkpoint's tokenizer, read from its local directory by transformers.

    `tokenizer.json` is taken as it stands; no model hub is contacted.

    Raises:
        ValueError: `path` is no directory, or holds no usable `tokenizer.json`.
    """

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"wanted a directory with a tokenizer.json, got {str(path)!r}")
        loader = _fast_tokenizer_class()
        try:
            # A cut-off file makes `tokenizers` raise a bare Exception, and json a ValueError.
            json.loads((directory / "tokenizer.json").read_bytes())
            self._tokenizer: Any = loader.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{str(path)!r} holds no usable tokenizer: {error}") from error
        self._backend = self._tokenizer.backend_tokenizer
        # Either may be switched on in tokenizer.json and would silently change a prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder().values()
        self._control_tokens = frozenset(token.content for token in added if token.special)

    @property
    def vocab_size(self) -> int:
        """Token ids that it knows, added tokens included; the model's table may be larger."""
        return len(self._tokenizer)

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end-of-text id; the checkpoint may name more."""
        return self._tokenizer.eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that the checkpoint puts around a text (BOS).

        Args:
            text: any text; the names of control tokens in it become those tokens.
            add_special_tokens: False for text that has them already, as a rendered template has.

        Raises:
            ValueError: `text` is not a string of whole characters (a lone surrogate is not).
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt's text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a surrogate pair cannot be encoded: {error}") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary stand for the empty text.

        A model's output table may be padded beyond the vocabulary, so such ids can be sampled.
        Bytes that form no character become U+FFFD. Spaces are not tidied up.
        """
        known = [token for token in token_ids if 0 <= token < 2**32]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def is_left_out(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` drops a token before it looks at those around it.

        So it does with ids outside the vocabulary and with control tokens that are to be skipped,
        but not with every token that is the empty text where it stands alone.
        """
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        return token is None or (skip_special_tokens and token in self._control_tokens)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The conversation as the model reads it, up to where the assistant begins to speak.

        Args:
            messages: mappings with `role` and `content`, oldest first.

        Raises:
            ValueError: a message is malformed, the checkpoint has no chat template, or the
                template refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError("this checkpoint has no chat template; use generate with plain text")
        import jinja2

        for message in _checked_messages(messages):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"a message needs role and content, got {message!r}")
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError) as error:  # "a" + 5 in a template: TypeError
            raise ValueError(f"the chat template refuses this conversation: {error}") from error

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of `render_chat(messages)`; BOS is there only if the template writes it."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def _fast_tokenizer_class() -> Any:
    """transformers' class for a `tokenizer.json`.

    Imported when needed, since it takes a good second, and without the remark that PyTorch is
    missing: tokenizers do not need it.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(is_news)
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        logger.removeFilter(is_news)
    return PreTrainedTokenizerFast


def _checked_messages(messages: Any) -> Sequence[Message]:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError(f"a conversation is a list of messages, at least one; got {messages!r}")
    return messages


class Decoder(Protocol):
    """What `TextStream` needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`."""
        ...

    def is_left_out(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether any text is the same without this token."""
        ...


class TextStream:
    """Turns one completion's tokens into text as they come, and watches for stop strings.

    The pieces add up to `decode` of all tokens, cut at the stop string. Two things are held back
    until later tokens decide them: the end of the text while it decodes to U+FFFD (a character
    whose bytes have not all come; dropped if they never do), and, unless the stop string is to
    be kept, the longest end of the text that a stop string could begin with.

    The stop string that is complete first ends the text, and of those complete at the same
    character the longest: the result does not depend on how the text is cut into tokens.

    A token that itself ends the text (end of text, a stop token) is pushed only if its text is
    wanted (`include_stop_str_in_output`); otherwise go straight to `flush`.

    Args:
        tokenizer: decodes the tokens.
        stop: a string that ends the text, or several; none empty.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave control tokens out of the text.
        min_tokens: a stop string that is complete before this many tokens is ordinary text.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0  # pushed so far, the one that completed a stop string included
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._keep_stop = include_stop_str_in_output
        self._skip_special = skip_special_tokens
        self._min_tokens = min_tokens
        # Window of tokens that is decoded again with each new one: the last complete piece of
        # text, which gives the context (some decoders treat the first token differently), and
        # what follows it. `_sent` characters of the window's text have been passed on. Tokens that
        # are left out never enter it: a long run of them would be decoded anew with each one.
        self._window: list[int] = []
        self._context = 0  # tokens of the window that belong to the complete piece
        self._sent = 0
        self._tail = ""  # longest end of the text that could begin a stop string

    @classmethod
    def for_params(cls, tokenizer: Decoder, params: SamplingParams) -> TextStream:
        """The stream that a request with these `params` needs."""
        return cls(
            tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    @property
    def keeps_stop(self) -> bool:
        """Whether what stops the text is a part of it."""
        return self._keep_stop

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Add tokens; returns the text they release and the stop string they completed, if any.

        Tokens after the one that completes a stop string are ignored; `num_tokens` tells how
        many were taken.

        Raises:
            ValueError: a stop string has already ended this text.
        """
        if self.stopped_by is not None:
            raise ValueError(f"the text has already been ended by {self.stopped_by!r}")
        at_once = self._detokenize_run(token_ids)
        if at_once is not None:
            return at_once, None
        released = []
        for token in token_ids:
            self.num_tokens += 1
            released.append(self._match(self._detokenize(token)))
            if self.stopped_by is not None:
                break
        return "".join(released), self.stopped_by

    def flush(self) -> str:
        """The text still held back because it could have begun a stop string; call it last."""
        held, self._tail = self._tail, ""
        return "" if self._keep_stop or self.stopped_by is not None else held

    def _detokenize_run(self, token_ids: Sequence[int]) -> str | None:
        """The text of many tokens, which takes a fraction of the time that they take one by one.

        None, and nothing done, if a stop string could end the text within, or if there are bytes
        that form no character: what becomes of those can depend on how many come at once.
        """
        if self._stop or len(token_ids) < 2:
            return None
        window = [*self._window, *(token for token in token_ids if not self._is_left_out(token))]
        if len(window) == len(self._window):
            self.num_tokens += len(token_ids)
            return ""
        text = self._decode(window)
        if _REPLACEMENT in text or len(text) <= self._sent:
            return None
        new = text[self._sent :]
        self.num_tokens += len(token_ids)
        self._end_piece(window, text)
        return new

    def _detokenize(self, token: int) -> str:
        """The text that is certain now that `token` has come."""
        if self._is_left_out(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._sent :]
        if new and len(certain) == len(text):
            self._end_piece(self._window, text)
        elif len(self._window) - self._context > _MOST_UNDECIDED and (
            len(text) - len(certain) > _STILL_UNDECIDED
        ):
            new = self._decide(text)
        else:
            self._sent = max(self._sent, len(certain))
        return new

    def _end_piece(self, window: list[int], text: str) -> None:
        """All of a window's text is passed on: its last piece is the context of what comes next."""
        if self._context:
            window = window[self._context :]
            text = self._decode(window)
        self._window, self._context, self._sent = window, len(window), len(text)

    def _decide(self, text: str) -> str:
        """Pass on all of the window's text but that of its last tokens, which become the window.

        Else a long run of bytes that form no character would be decoded anew with each of them.
        """
        count = _STILL_UNDECIDED
        while _num_undecided(end := self._decode(self._window[-count:])) < _STILL_UNDECIDED // 2:
            count *= 2  # some of them have no text
        held = min(_num_undecided(end), _num_undecided(text))
        new = text[self._sent : len(text) - held]
        self._window, self._context, self._sent = self._window[-count:], 0, len(end) - held
        return new

    def _is_left_out(self, token: int) -> bool:
        return self._tokenizer.is_left_out(token, skip_special_tokens=self._skip_special)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)

    def _match(self, new: str) -> str:
        """What may be passed on once `new` is added to the text; sets `stopped_by`."""
        if not self._stop:
            return new
        text = self._tail + new
        if self.num_tokens >= self._min_tokens:
            matches = []
            for stop in self._stop:
                # One that was complete in the tail already came before min_tokens.
                start = text.find(stop, max(0, len(self._tail) + 1 - len(stop)))
                if start >= 0:
                    matches.append((start + len(stop), start, stop))
            if matches:
                end, start, self.stopped_by = min(matches)
                return text[len(self._tail) : end] if self._keep_stop else text[:start]
        old_tail, self._tail = self._tail, self._stop_prefix(text)
        return text[len(old_tail) :] if self._keep_stop else text[: len(text) - len(self._tail)]

    def _stop_prefix(self, text: str) -> str:
        """The longest end of `text` that is the beginning, but not the whole, of a stop string."""
        longest = max(map(len, self._stop)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            end = text[start:]
            if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop):
                return end
        return ""


def _num_undecided(text: str) -> int:
    """Characters at the end of a text that later bytes may make other ones."""
    return len(text) - len(text.rstrip(_REPLACEMENT))
