"""The scheduler's own state of one request."""

from __future__ import annotations

import enum
from array import array
from copy import copy

import numpy as np

from scheduler.plan import Int32
from scheduler.prefix_index import PrefixIndex
from scheduler.request import Request
from scheduler.tiers import HostBlock

NO_ROW = -1


class Status(enum.Enum):
    """Where a sequence stands.

    WAITING: owns no blocks; new, or preempted.
    RUNNING: owns blocks and a row of the block table.
    DRAINING: everything it needs is planned; it owns nothing and only awaits its last token.
    FINISHED: no longer known to the scheduler.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"


class Sequence:
    """Tokens of one request and how far they have been computed.

    There are no prefill and decode phases: `num_computed` catches up with the tokens that the
    sequence has. Positions `0 .. num_known` hold tokens that the host knows, the `num_pending`
    positions after them hold tokens that have been sampled, or will have been when the plans in
    flight are done, but were not read yet:

        | prompt | outputs |  pending  |
        0                num_known   num_tokens
        |   num_computed ...   |

    Attributes:
        request: what was asked for.
        seq_id: identity, increasing in order of arrival.
        prompt: int32[prompt_len], read-only.
        prompt_len: its length.
        outputs: generated tokens that are known, int32.
        limit: most tokens it may have, prompt included.
        stop_token_ids: those of its request.
        is_beam: likewise.
        num_known: prompt and output tokens that are known.
        num_tokens: tokens it has, known or not.
        pending_row: sample row of the newest pending token in its plan.
        num_computed: tokens whose keys and values are in the cache once all plans are done.
        num_written: the same once all plans but its newest are done; others may read these in
            the next plan.
        score_from: first prompt position whose sample row is still to be planned; the prompt's
            length if nobody asked for prompt logprobs.
        status: where it stands.
        blocks: its KV blocks in order.
        num_passed: how many of the first ones have left the attention window and are not its own
            any more; the null block stands in their place here.
        capacity: tokens that these blocks hold.
        row: its row of the block table.
        tail_shared: whether the block that it writes to next may have other owners.
        num_indexed: how many of its first blocks were offered to the prefix index.
        parent: number of the content of the last of these in the index; None if its blocks are
            not to be indexed.
        salt: what its keys and values depend on besides the tokens, as bytes.
        epoch: how often the prefix cache had been reset when it was admitted.
        num_cached_tokens: prompt tokens that were found in the cache when it was first admitted;
            None before that.
        saved: where its blocks are kept while it is swapped out; `num_computed` stands still then.
        coming: blocks of its prefix that were being read from the disk when it was queued; None
            before that was looked up.
        prompt_keys: what the full blocks of its prompt are indexed under, as far as needed so far.
        siblings: the live sequences of its prompt, itself among them; empty if it is alone.
        held: a beam whose next token is to be chosen, and which no plan computes before that.
        arrived: when, in seconds of the scheduler's clock; 0 if nobody goes by it.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "capacity",
        "coming",
        "epoch",
        "held",
        "is_beam",
        "limit",
        "num_cached_tokens",
        "num_computed",
        "num_indexed",
        "num_known",
        "num_passed",
        "num_tokens",
        "num_written",
        "outputs",
        "parent",
        "pending_row",
        "prompt",
        "prompt_keys",
        "prompt_len",
        "request",
        "row",
        "salt",
        "saved",
        "score_from",
        "seq_id",
        "siblings",
        "status",
        "stop_token_ids",
        "tail_shared",
    )

    def __init__(self, request: Request, prompt: Int32, seq_id: int, max_seq_len: int) -> None:
        self.request = request
        self.seq_id = seq_id
        self.prompt = prompt
        self.prompt_len = len(prompt)
        self.outputs = array("i")
        self.limit = min(len(prompt) + request.stop.max_tokens, max_seq_len)
        self.stop_token_ids = request.stop.stop_token_ids
        self.is_beam = request.beam
        self.num_known = self.num_tokens = len(prompt)
        self.pending_row = NO_ROW
        self.num_computed = 0
        self.num_written = 0
        self.score_from = 0 if request.prompt_logprobs else len(prompt)
        self.status = Status.WAITING
        self.blocks: list[int] = []
        self.num_passed = 0
        self.capacity = 0
        self.row = NO_ROW
        self.tail_shared = False
        self.num_indexed = 0
        self.parent: int | None = None
        self.salt = repr(sorted(request.cache_salt)).encode() if request.cache_salt else b""
        self.epoch = 0
        self.num_cached_tokens: int | None = None
        self.saved: list[HostBlock | None] | None = None
        self.coming: list[HostBlock] | None = None
        self.prompt_keys: list[bytes] = []
        self.siblings: list[Sequence] = []
        self.held = False
        self.arrived = 0.0

    @property
    def num_pending(self) -> int:
        """Tokens sampled but not read."""
        return self.num_tokens - self.num_known

    def snapshot(self) -> Sequence:
        """What it is now, whatever becomes of it; to be read only."""
        now = copy(self)
        now.outputs = self.outputs[:]
        return now

    def token(self, position: int) -> int:
        """The token at one position, 0 while it is pending."""
        index = position - len(self.prompt)
        if index < 0:
            return int(self.prompt[position])
        return self.outputs[index] if index < len(self.outputs) else 0

    def tokens(self, start: int, end: int) -> Int32:
        """Tokens at positions `start .. end`, int32[end - start], 0 where still pending."""
        prompt_len = len(self.prompt)
        if end <= prompt_len:
            return self.prompt[start:end]
        tokens = np.zeros(end - start, np.int32)
        split = max(prompt_len - start, 0)
        tokens[:split] = self.prompt[start:]
        outputs = self.outputs[start + split - prompt_len : end - prompt_len]
        tokens[split : split + len(outputs)] = outputs
        return tokens

    def known_bytes(self, start: int, end: int) -> bytes:
        """The int32 tokens at positions `start .. end`, all of them known, as bytes."""
        prompt_len = len(self.prompt)
        outputs = self.outputs[max(start - prompt_len, 0) : max(end - prompt_len, 0)]
        return self.prompt[start:end].tobytes() + outputs.tobytes()

    def keys(self, index: PrefixIndex, num_blocks: int) -> list[bytes]:
        """What the first full blocks are indexed under; those of the prompt are remembered."""
        size, keys = index.block_size, self.prompt_keys
        in_prompt = min(num_blocks, len(self.prompt) // size)
        if len(keys) < in_prompt:
            tokens = self.known_bytes(len(keys) * size, in_prompt * size)
            keys += index.keys(tokens, keys[-1] if keys else None, self.salt)
        keys = keys[:in_prompt]
        if num_blocks > in_prompt:
            tokens = self.known_bytes(in_prompt * size, num_blocks * size)
            keys += index.keys(tokens, keys[-1] if keys else None, self.salt)
        return keys
