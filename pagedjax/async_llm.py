"""Streaming generation for asyncio: one thread runs the engine, every request is a stream."""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedjax.engine.request_checks import check_request_id
from pagedjax.frontend import Frontend, Prompt, check_port, resize_pool, serve_metrics, start_engine
from pagedjax.heap import settled_heap
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from pagedjax.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine
    from pagedjax.engine.stats import EngineStats
    from pagedjax.models.params import Params

_Item = RequestOutput | BaseException
_Command = tuple[Callable[[], Any], "Future[Any]"]


class EngineStopped(RuntimeError):
    """The engine no longer runs: it was closed, or it failed (see `__cause__`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Where the deltas of a live request go: a queue that belongs to its reader's event loop."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)


class AsyncLLM:
    """A language model that streams answers to any number of asyncio tasks.

    All calls of the engine happen in one thread of its own, which sleeps while there is no
    request. Use it as an async context manager, or call `close` when done.

    Args:
        model: as for `LLM`.
        progress: as for `LLM`.
        metrics_port: as for `LLM`.
        metrics_host: as for `LLM`.
        **options: fields of `EngineConfig`.

    Attributes:
        metrics: as for `LLM`.

    Raises:
        ValueError: an option, the port or the checkpoint is not usable.
        OSError: the port is taken.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        progress: bool = False,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        **options: Any,
    ) -> None:
        check_port(metrics_port)
        self._start(start_engine(model, progress=progress, **options), metrics_port, metrics_host)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, metrics_port: int | None = None, metrics_host: str = "127.0.0.1"
    ) -> AsyncLLM:
        """An `AsyncLLM` around an engine that exists already and that nothing else uses."""
        llm = cls.__new__(cls)
        llm._start(engine, metrics_port, metrics_host)
        return llm

    def _start(self, engine: Engine, metrics_port: int | None, metrics_host: str) -> None:
        self._frontend = Frontend(engine)
        self.metrics = serve_metrics(engine, metrics_port, metrics_host)
        self._engine = engine
        self._lock = threading.Lock()  # guards the four below
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # by the id of a live request
        self._num_named = 0
        self._stop_error: EngineStopped | None = None
        self._running: set[_Stream] = set()  # known to the engine; the engine thread's own
        self._closing = False  # the engine thread's own
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a step must not outlive the modules that it uses

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None if it brings none."""
        return self._frontend.tokenizer

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Abort what runs and stop the engine's thread; waiting streams raise `EngineStopped`."""
        atexit.unregister(self.close)
        self._submit(self._begin_closing)
        self._thread.join()
        if self.metrics is not None:
            self.metrics.close()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the completion of one prompt, as deltas (see `pagedjax.outputs`).

        Leaving the loop early, by `break`, by an exception or by cancellation, aborts the
        request; with `break`, once the iterator is closed (`contextlib.aclosing`) or forgotten.

        Args:
            prompt: text or token ids.
            params: None takes the checkpoint's own settings.
            priority: lower values are served earlier; see `LLM.generate`.
            request_id: a name for `abort`, free again once the request has ended; None makes one.

        Raises:
            ValueError: the request cannot be served, or its id is in use.
            EngineStopped: the engine was closed, or failed, before the request ended.
        """
        checked = self._frontend.params(params)
        return self._stream(*self._frontend.tokens(prompt), checked, priority, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the assistant's answer to one conversation; otherwise like `generate`."""
        checked = self._frontend.params(params)
        return self._stream(*self._frontend.chat_tokens(messages), checked, priority, request_id)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestOutput:
        """The likeliest completions of one prompt that a beam search finds, best first.

        They are known when the search ends, all at once. Cancelling the call aborts it.

        Args:
            prompt: text or token ids.
            params: width of the search and when it ends.
            priority: as in `generate`.
            request_id: as in `generate`.

        Raises:
            ValueError: as in `generate`, or `params` is not `BeamSearchParams`.
            EngineStopped: as in `generate`.
        """
        search = self._frontend.beam_params(params)
        stream = self._stream(*self._frontend.tokens(prompt), search, priority, request_id)
        async with aclosing(stream):
            return RequestOutput.joined([delta async for delta in stream])

    async def abort(self, request_id: str) -> None:
        """End a request now; its stream yields a last delta with the reason `abort`.

        Nothing happens if there is no such request, or not any more.

        Raises:
            ValueError: `request_id` is no string.
        """
        check_request_id(request_id)  # the engine's thread would fail to look it up
        await asyncio.wrap_future(self._submit(lambda: self._engine.abort(request_id)))

    async def stats(self) -> EngineStats:
        """The engine's counters, as they are between two steps.

        Raises:
            EngineStopped: the engine was closed, or failed.
        """
        return await asyncio.wrap_future(self._submit(self._engine.stats))

    async def swap_params(self, params: Params) -> None:
        """Serve with other parameters from the next step on; see `Engine.swap_params`.

        Args:
            params: as `LoadedModel.params`: the same names, shapes and dtypes, on the same device.

        Raises:
            ValueError: as there; nothing has changed.
            EngineStopped: the engine was closed, or failed.
        """
        await asyncio.wrap_future(self._submit(lambda: self._engine.swap_params(params)))

    async def resize_pool(self, num_blocks: int) -> None:
        """Give the KV pool another size; see `LLM.resize_pool`. Steps wait meanwhile.

        Raises:
            ValueError: a running request is longer than such a pool, a beam search runs, or there
                is not so much memory; everything goes on as before.
            EngineStopped: the engine was closed, or failed.
        """
        resize = partial(resize_pool, self._engine, self.metrics, num_blocks)
        await asyncio.wrap_future(self._submit(resize))

    async def snapshot(self, path: str | Path) -> None:
        """Write the prefix cache and the running requests to a directory; see `LLM.snapshot`.

        Steps wait while it is written.

        Raises:
            ValueError: there is something else.
            OSError: it can not be written; the engine goes on.
            EngineStopped: the engine was closed, or failed.
        """
        directory = Path(path)  # here, where what is no path harms nobody else
        await asyncio.wrap_future(self._submit(lambda: self._engine.snapshot(directory)))

    async def restore(self, path: str | Path) -> dict[str, AsyncGenerator[RequestOutput, None]]:
        """Go on where a snapshot was taken, in another process perhaps; see `LLM.restore`.

        Returns:
            A stream for each request by its id, in order of arrival. Its first delta repeats what
            the request had said before, without log-probabilities. Leaving a stream that was begun
            aborts its request; one that is not begun lets it run to its end.

        Raises:
            ValueError: the snapshot is of another model or damaged, or requests are running here.
            EngineStopped: the engine was closed, or failed.
        """
        directory, loop = Path(path), asyncio.get_running_loop()
        restored = await asyncio.wrap_future(self._submit(lambda: self._restore(directory, loop)))
        return {stream.request_id: self._read(stream) for stream in restored}

    async def _stream(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        priority: int,
        request_id: str | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        stream = self._register(request_id)
        add = partial(self._engine.add_request, stream.request_id, text, token_ids, params)
        added = self._submit(lambda: self._add(stream, partial(add, priority=priority)))
        async with aclosing(self._read(stream, added)) as deltas:
            async for delta in deltas:
                yield delta

    async def _read(
        self, stream: _Stream, added: Future[None] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The deltas of a request, which is aborted when its reader leaves."""
        finished = False
        try:
            if added is not None:
                await asyncio.wrap_future(added)
            while not finished:
                item = await stream.items.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._submit(lambda: self._drop(stream))

    def _register(self, request_id: str | None) -> _Stream:
        if request_id is not None:
            check_request_id(request_id)
        with self._lock:
            if self._stop_error is not None:
                raise _again(self._stop_error)
            name = request_id
            while name is None or (request_id is None and name in self._streams):
                self._num_named += 1
                name = f"request-{self._num_named}"
            if name in self._streams:
                raise ValueError(f"request id {name!r} is in use by a live request")
            stream = self._streams[name] = _Stream(name, asyncio.get_running_loop())
            return stream

    def _release(self, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def _submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Let the engine's thread call `function` between two steps."""
        future: Future[Any] = Future()
        with self._lock:
            if self._stop_error is None:
                self._commands.put((function, future))
            else:
                future.set_exception(_again(self._stop_error))
        return future

    # From here on: the engine's thread.

    def _run(self) -> None:
        failure = None
        try:
            while not self._closing:
                self._obey(wait=not self._engine.has_unfinished())
                with settled_heap():
                    while self._engine.has_unfinished() and not self._closing:
                        news = self._engine.step()
                        if self.metrics is not None:
                            self.metrics.look()  # before anybody hears of the step and asks for it
                        self._deliver(news)
                        # The device is busy: who comes while it is need not miss the next plan.
                        self._engine.wait()
                        self._obey()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            failure = error
        self._stop(failure)

    def _obey(self, *, wait: bool = False) -> None:
        """Carry out all waiting commands; with `wait`, sleep until there is one."""
        while wait or not self._commands.empty():
            function, future = self._commands.get()
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                # A refusal, or a disk that does not take a snapshot; the rest is a failure.
                if not isinstance(error, (ValueError, OSError)):
                    raise

    def _begin_closing(self) -> None:
        self._closing = True

    def _add(self, stream: _Stream, add: Callable[[], None]) -> None:
        try:
            add()
        except ValueError:
            self._release(stream)  # before the caller hears of it, who may try again
            raise
        self._running.add(stream)

    def _restore(self, path: Path, loop: asyncio.AbstractEventLoop) -> list[_Stream]:
        """Restore a snapshot; the streams of its requests, which hold what was said before."""
        if self._engine.has_unfinished():  # perhaps only the last words of those whose readers left
            self._deliver(self._engine.step())
        with self._lock:
            if self._streams:
                raise ValueError(
                    "a snapshot is restored into an idle engine, this one has requests: "
                    f"{sorted(self._streams)}"
                )
        said = self._engine.restore(path)
        streams = [_Stream(output.request_id, loop) for output in said]
        with self._lock:
            self._streams |= {stream.request_id: stream for stream in streams}
        self._running.update(streams)
        self._deliver(said)
        return streams

    def _drop(self, stream: _Stream) -> None:
        """End a request whose reader has left; its id is free once its last delta has come."""
        if stream in self._running:
            self._engine.abort(stream.request_id)
        else:
            self._release(stream)

    def _deliver(self, deltas: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]] = defaultdict(list)
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream not in self._running:
                continue  # the last words of a request from before this object had the engine
            by_loop[stream.loop].append((stream, delta))
            if delta.finished:
                self._running.discard(stream)
                self._release(stream)
        for loop, items in by_loop.items():
            if not _post(loop, items):
                for stream, _ in items:  # nobody can read these any more
                    self._drop(stream)

    def _stop(self, failure: BaseException | None) -> None:
        if failure is None:
            for stream in self._running:
                self._engine.abort(stream.request_id)
            error = EngineStopped("the engine has been closed")
        else:
            error = EngineStopped(f"the engine failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        with self._lock:
            self._stop_error = error
            streams, self._streams = list(self._streams.values()), {}
        while not self._commands.empty():
            _, future = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(_again(error))
        for stream in streams:
            _post(stream.loop, [(stream, _again(error))])
        if failure is None and self._engine.has_unfinished():
            self._engine.step()  # brings the last words of what was aborted: the engine is idle


def _again(error: EngineStopped) -> EngineStopped:
    """A copy of its own for each who raises it, since raising writes a traceback into it."""
    copy = EngineStopped(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, _Item]]) -> bool:
    """Put `items` into their queues, in `loop`'s thread; False if that loop has been closed."""
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:
        return False
    return True


def _put_all(items: list[tuple[_Stream, _Item]]) -> None:
    for stream, item in items:
        stream.items.put_nowait(item)
