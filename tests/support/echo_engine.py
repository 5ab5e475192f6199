"""An engine without a model and a tokenizer without a file, for tests of what sits above them."""

import dataclasses
import time

import numpy as np

from pagedjax.engine.stats import EngineStats
from pagedjax.models.generation import GenerationDefaults
from pagedjax.outputs import CompletionOutput, RequestOutput, Timings
from pagedjax.tokenizer import TextStream
from scheduler.block_map import BlockMap


class ByteTokenizer:
    """One token per byte of UTF-8; ids from 256 on are beyond the vocabulary."""

    vocab_size = 256
    eos_id = 0

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def is_left_out(self, token_id, *, skip_special_tokens=True):
        return token_id >= 256

    def render_chat(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


class PieceTokenizer:
    """Token `i` is the `i`-th of the given pieces of text."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(self.pieces[t] for t in token_ids)

    def is_left_out(self, token_id, *, skip_special_tokens=True):
        return False


def stats_of(**figures):
    """Figures of an engine; those that are not given are zero."""
    fields = dataclasses.fields(EngineStats)
    zeros = {field.name: 0 for field in fields if field.default_factory is dataclasses.MISSING}
    return EngineStats(**{**zeros, **figures})


class EchoEngine:
    """Repeats each prompt's tokens, one a step, until `max_tokens`; refuses as the real one does.

    Attributes:
        aborted: ids that `abort` was called with.
        fail_at: number of the step that raises `failure`; None for no failure.
    """

    def __init__(self, *, max_model_len=64, max_num_seqs=4):
        self.tokenizer = ByteTokenizer()
        self.generation = GenerationDefaults()
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.aborted = []
        self.steps = 0
        self.fail_at = None
        self.failure = RuntimeError("device lost")
        self.seen_params = []
        self.prompts = []
        self.priorities = []
        self._live = {}
        self._last_words = []
        self._held = {}  # deltas so far, of requests that are not streamed

    def add_request(self, request_id, prompt, prompt_token_ids, params, *, priority=0, stream=True):
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        if not prompt_token_ids:
            raise ValueError("the prompt is empty")
        if len(prompt_token_ids) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(prompt_token_ids)} tokens")
        self.seen_params.append(params)
        self.prompts.append(prompt)
        self.priorities.append(priority)
        request = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(prompt_token_ids),
            timings=Timings(arrived=time.monotonic()),
        )
        text = TextStream.for_params(self.tokenizer, params)
        self._live[request_id] = (request, params, text, [])
        if not stream:
            self._held[request_id] = []

    def abort(self, request_id):
        self.aborted.append(request_id)
        if request_id in self._live:
            request, _, stream, _ = self._live.pop(request_id)
            self._last_words.append(self._delta(request, stream.flush(), (), "abort", None))

    def has_unfinished(self):
        return bool(self._live or self._last_words)

    def wait(self):
        pass

    def step(self):
        self.steps += 1
        if self.steps == self.fail_at:
            raise self.failure
        deltas, self._last_words = self._last_words, []
        for request_id in list(self._live)[: self.max_num_seqs]:
            request, params, stream, done = self._live[request_id]
            token = request.prompt_token_ids[len(done) % len(request.prompt_token_ids)]
            done.append(token)
            text, stopped_by = stream.push([token])
            reason = "stop" if stopped_by else None
            if reason is None and len(done) == params.max_tokens:
                reason = "length"
            if reason:
                text += stream.flush()
                del self._live[request_id]
            deltas.append(self._delta(request, text, (token,), reason, stopped_by))
        return [delta for delta in map(self._held_back, deltas) if delta is not None]

    def _held_back(self, delta):
        """The delta, or of a request that is not streamed all of them once it has finished."""
        if delta.request_id not in self._held:
            return delta
        self._held[delta.request_id].append(delta)
        return RequestOutput.joined(self._held.pop(delta.request_id)) if delta.finished else None

    def stats(self):
        return stats_of(steps=self.steps, num_running=len(self._live), blocks_total=1)

    def block_map(self):
        flags = np.zeros(1, np.bool_)
        return BlockMap(block_size=16, used=flags, cached=flags, tokens=np.zeros(1, np.int32))

    def _delta(self, request, text, tokens, reason, stopped_by):
        output = CompletionOutput(
            index=0, text=text, token_ids=tokens, finish_reason=reason, stop_reason=stopped_by
        )
        return dataclasses.replace(request, outputs=(output,), finished=reason is not None)
