"""Blocking generation: prompts in, results out, in order."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedjax.frontend import (
    Frontend,
    Prompt,
    check_port,
    conversation_list,
    priority_list,
    prompt_list,
    resize_pool,
    serve_metrics,
    start_engine,
)
from pagedjax.heap import settled_heap
from pagedjax.outputs import RequestOutput, Timings
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from pagedjax.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine

Deltas = Generator[tuple[int, RequestOutput], None, None]
Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int]


class Asked(NamedTuple):
    """A prompt, how it becomes text and token ids, and what is asked for."""

    prompt: Any
    tokens: Any
    params: SamplingParams | BeamSearchParams
    priority: int


class LLM:
    """A language model that answers many prompts at once. For use by one thread at a time.

    Args:
        model: directory of a native checkpoint (`pagedjax convert`), or of a Hugging Face one,
            which is then converted in memory.
        progress: show a bar on standard error while steps are compiled.
        metrics_port: serve Prometheus metrics there until `close` (`pagedjax.metrics`); 0 takes
            any free port, see `metrics`.
        metrics_host: address to serve them at.
        **options: fields of `EngineConfig`.

    Attributes:
        metrics: the server of the metrics, if there is one.

    Raises:
        ValueError: an option, the port or the checkpoint is not usable.
        OSError: the port is taken.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        progress: bool = True,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        **options: Any,
    ) -> None:
        check_port(metrics_port)
        self._start(start_engine(model, progress=progress, **options), metrics_port, metrics_host)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, metrics_port: int | None = None, metrics_host: str = "127.0.0.1"
    ) -> LLM:
        """An `LLM` around an engine that exists already, with parameters of your own perhaps."""
        llm = cls.__new__(cls)
        llm._start(engine, metrics_port, metrics_host)
        return llm

    def _start(self, engine: Engine, metrics_port: int | None, metrics_host: str) -> None:
        self._frontend = Frontend(engine)
        self.metrics = serve_metrics(engine, metrics_port, metrics_host)
        self._request_ids = map(str, itertools.count())
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # by the id of a live request

    def close(self) -> None:
        """Stop serving metrics; does nothing without them."""
        if self.metrics is not None:
            self.metrics.close()

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests."""
        return self._frontend.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None if it brings none."""
        return self._frontend.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: Priority = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        A request that cannot be served (an empty prompt, one that is too long) gets a result
        with `error` set and the finish reason `error`; the others are not affected.

        Args:
            prompts: text or token ids, or a list of such prompts.
            params: for all prompts, or one for each; None takes the checkpoint's own settings.
            priority: for all prompts, or one for each. Lower values are served earlier and, where
                places or memory are short, take them from higher ones; of equals, the first to
                come is served first.
            progress: show a bar on standard error.

        Raises:
            ValueError: `prompts` is no prompt at all, or `params` or `priority` do not match them.
        """
        requests = self._requests(prompt_list(prompts), self._frontend.tokens, params, priority)
        return self._collect(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        priority: Priority = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Let the assistant answer one conversation, or each of several.

        >>> llm.chat([{"role": "user", "content": "What is JAX?"}])  # doctest: +SKIP

        Args:
            messages: mappings with `role` and `content`, oldest first; or a list of such lists.
            params: as in `generate`.
            priority: as in `generate`.
            progress: as in `generate`.

        Raises:
            ValueError: as in `generate`.
        """
        conversations = conversation_list(messages)
        chat_tokens = self._frontend.chat_tokens
        requests = self._requests(conversations, chat_tokens, params, priority)
        return self._collect(requests, progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: Priority = 0,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The likeliest completions of every prompt that a beam search finds, best first.

        The beams of a prompt share its keys and values, and what else they have in common.

        Args:
            prompts: as in `generate`.
            params: width of the search and when it ends.
            priority: as in `generate`.
            progress: show a bar on standard error.

        Raises:
            ValueError: `prompts` is no prompt at all, `params` is not `BeamSearchParams`, or
                `priority` does not match the prompts.
        """
        search, items = self._frontend.beam_params(params), prompt_list(prompts)
        each = zip(items, priority_list(priority, len(items)), strict=True)
        tokens = self._frontend.tokens
        return self._collect([Asked(p, tokens, search, first) for p, first in each], progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: Priority = 0,
    ) -> Deltas:
        """Like `generate`, but yields `(index of the prompt, delta)` as the text comes.

        Closing the iterator early aborts what has not finished.
        """
        requests = self._requests(prompt_list(prompts), self._frontend.tokens, params, priority)
        return self._deltas(requests)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        priority: Priority = 0,
    ) -> Deltas:
        """Like `chat`, but yields `(index of the conversation, delta)` as the text comes."""
        conversations = conversation_list(messages)
        chat_tokens = self._frontend.chat_tokens
        return self._deltas(self._requests(conversations, chat_tokens, params, priority))

    def snapshot(self, path: str | Path) -> None:
        """Write the prefix cache and the running requests to a directory; all go on here too.

        Between two deltas of `stream`, or after `generate`, when only the cache is left.

        What lies in host memory below the pool is left out; files of a disk cache stay where they
        are, for the same weights to find them.

        Args:
            path: to be created; an earlier snapshot there is replaced.

        Raises:
            ValueError: there is something else.
        """
        self.engine.snapshot(path)

    def restore(self, path: str | Path) -> Deltas:
        """Go on where `snapshot` was taken, in another process perhaps.

        Args:
            path: a snapshot of the same model with the same weights and kind of KV cache; the
                pool may have another size.

        Returns:
            Like `stream`, with the requests numbered in order of arrival. Each one's first delta
            repeats what it had said before, without log-probabilities. Closing it early aborts what
            has not finished.

        Raises:
            ValueError: the snapshot is of another model or damaged, or requests are running here.
        """
        if self.engine.has_unfinished():  # perhaps only the last words of what was closed early
            self._step()
        before = self.engine.restore(path)
        named = [int(one.request_id) for one in before if one.request_id.isdecimal()]
        first = max([int(next(self._request_ids)), *(number + 1 for number in named)])
        self._request_ids = map(str, itertools.count(first))
        # From here on, since another iterator may step the engine before this one begins.
        inbox: deque[RequestOutput] = deque()
        live = {output.request_id: index for index, output in enumerate(before)}
        self._inboxes |= dict.fromkeys(live, inbox)
        deltas = self._restored(before, live, inbox)
        next(deltas)  # what has not begun is not told that it is closed
        return deltas

    def resize_pool(self, num_blocks: int) -> None:
        """Give the KV pool another size; requests and as much of the cache as fits stay.

        Between two deltas of `stream` too. Steps are compiled anew if `warm_up` was on, host memory
        below the pool is emptied, and counters of the pool begin at 0. Ctrl-C waits for the end.

        Args:
            num_blocks: blocks of the pool, the null block included.

        Raises:
            ValueError: a running request is longer than such a pool, a beam search runs, or there
                is not so much memory; everything goes on as before.
        """
        with _interrupt_held_back():
            resize_pool(self.engine, self.metrics, num_blocks)

    def calibrate_kv(self, prompts: Prompt | Sequence[Prompt]) -> None:
        """Choose the scales of a compressed KV cache by prompts of your own; empties the cache.

        Args:
            prompts: text or token ids, typical of what will be served.

        Raises:
            ValueError: the cache is not compressed, a stream is open, or `prompts` are not usable.
        """
        sequences = [self._frontend.tokens(prompt)[1] for prompt in prompt_list(prompts)]
        self.engine.calibrate_kv(sequences)

    def _requests(
        self, prompts: list[Any], tokens: Any, params: Params, priority: Priority
    ) -> list[Asked]:
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams | None] = [params] * len(prompts)
        elif isinstance(params, Sized):
            each = params
        else:
            raise ValueError(f"wanted SamplingParams, got {type(params).__name__}")
        if len(each) != len(prompts):
            raise ValueError(f"got {len(each)} sampling params for {len(prompts)} prompts")
        return [
            Asked(prompt, tokens, self._frontend.params(one), first)
            for prompt, one, first in zip(
                prompts, each, priority_list(priority, len(prompts)), strict=True
            )
        ]

    def _deltas(self, requests: list[Asked], *, stream: bool = True) -> Deltas:
        inbox: deque[RequestOutput] = deque()
        live: dict[str, int] = {}
        try:
            for index, (prompt, tokens, params, priority) in enumerate(requests):
                request_id = next(self._request_ids)
                try:
                    text, token_ids = tokens(prompt)
                    self.engine.add_request(
                        request_id, text, token_ids, params, priority=priority, stream=stream
                    )
                except ValueError as error:
                    yield index, _refused(request_id, prompt, params, str(error))
                else:
                    live[request_id] = index
                    self._inboxes[request_id] = inbox
            yield from self._follow(live, inbox)
        finally:
            self._leave(live)

    def _restored(
        self, before: list[RequestOutput], live: dict[str, int], inbox: deque[RequestOutput]
    ) -> Generator[Any, None, None]:
        """Once begun, what restored requests had said before, then what they go on to say."""
        try:
            yield None
            yield from enumerate(before)
            yield from self._follow(live, inbox)
        finally:
            self._leave(live)

    def _follow(self, live: dict[str, int], inbox: deque[RequestOutput]) -> Deltas:
        """Run steps until all of `live` have finished; takes out of it those that have."""
        while live:
            if not inbox:
                self._step()
            while inbox:
                delta = inbox.popleft()
                index = live[delta.request_id]
                if delta.finished:
                    del live[delta.request_id], self._inboxes[delta.request_id]
                yield index, delta

    def _leave(self, live: dict[str, int]) -> None:
        """Abort what has not finished when its iterator is closed."""
        for request_id in live:
            del self._inboxes[request_id]
            self.engine.abort(request_id)

    def _step(self) -> None:
        """Run one step and hand its deltas to the iterators that wait for them.

        Several may be open at once. Deltas without an iterator are the last words of requests
        whose iterator was closed early. Ctrl-C ends the iterator that called, not the engine.
        """
        assert self.engine.has_unfinished(), "the engine lost a request"
        with _interrupt_held_back():
            for delta in self.engine.step():
                if delta.request_id in self._inboxes:
                    self._inboxes[delta.request_id].append(delta)
            if self.metrics is not None:
                self.metrics.look()

    def _collect(self, requests: list[Asked], progress: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs: dict[int, RequestOutput] = {}
        started, before = time.monotonic(), self.engine.stats().generated_tokens
        bar = tqdm(total=len(requests), unit="prompt", disable=not progress)
        with bar, settled_heap():
            for index, output in self._deltas(requests, stream=False):
                outputs[index] = output
                generated = self.engine.stats().generated_tokens - before
                rate = generated / max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                bar.update()
        return [outputs[index] for index in range(len(requests))]


@contextlib.contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Let a Ctrl-C wait for the end of the block: what is broken off loses tokens, or the pool.

    Does nothing where Ctrl-C is not turned into `KeyboardInterrupt` here: outside the main thread,
    or under another handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def _refused(
    request_id: str, prompt: object, params: SamplingParams | BeamSearchParams, error: str
) -> RequestOutput:
    now = time.monotonic()
    return RequestOutput.failed(
        error,
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        timings=Timings(arrived=now, finished=now),
        num_completions=params.n,
    )
