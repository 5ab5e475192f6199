"""Random lives of the whole memory system: tiers, a faulty disk, resizes, restarts, other options.

Every request's greedy tokens are those of whole recomputation, wherever its keys and values were.
"""

import random

import pytest

from pagedjax.engine import disk_tier
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from scheduler import invariants
from tests.engine.test_engine_traces import greedy_tokens
from tests.support.faulty_disk import FaultyDisk
from tests.support.tiny_engines import VOCAB, tiny_engine

OPERATIONS = 500
BLOCK_BYTES = 4096
SIZES = (9, 12, 15, 40)


class Life:
    """An engine that is driven, resized and restarted, and what its requests have said so far.

    Attributes:
        wanted: tokens of every completion, by request.
        parts: outputs so far, by request that has not ended.
        aborted: requests.
        finished: how many have ended.
        happened: what the memory system had to do.
    """

    def __init__(self, seed, path):
        self.rng = random.Random(seed)
        self.path = path
        self.engine = self._new_engine()
        self.wanted = {}
        self.parts = {}
        self.aborted = set()
        self.finished = 0
        self.happened = {"swaps": 0, "recomputed": 0, "found below": 0}
        bases = [[self.rng.randrange(VOCAB) for _ in range(90)] for _ in range(4)]
        self.prompts = [
            tuple(base[: self.rng.randint(1, 90)] + [self.rng.randrange(VOCAB)])
            for base in bases * 4
        ]

    def add(self, name):
        prompt, n = self.rng.choice(self.prompts), self.rng.choice([1, 1, 3])
        params = SamplingParams(temperature=0.0, max_tokens=self.rng.randint(1, 30), n=n)
        self.wanted[name] = greedy_tokens(prompt)[: params.max_tokens]
        self.parts[name] = []
        priority = self.rng.choice([0, 0, 1])
        self.engine.add_request(name, None, prompt, params, priority=priority)

    def step(self):
        for delta in self.engine.step():
            name = delta.request_id
            self.parts[name].append(delta)
            if delta.finished:
                outputs = RequestOutput.joined(self.parts.pop(name)).outputs
                was_aborted = any(output.finish_reason == "abort" for output in outputs)
                assert was_aborted <= (name in self.aborted)
                for output in outputs:
                    assert output.token_ids == self.wanted[name][: len(output.token_ids)]
                    is_whole = len(output.token_ids) == len(self.wanted[name])
                    assert is_whole or output.finish_reason == "abort"
                self.finished += 1
        invariants.check(self.engine._scheduler)

    def abort(self):
        if self.parts:
            name = self.rng.choice(list(self.parts))
            self.aborted.add(name)
            self.engine.abort(name)

    def resize(self):
        self.note()
        try:
            self.engine.resize_pool(self.rng.choice(SIZES))
        except ValueError as refused:
            assert "a request has" in str(refused)

    def restart(self):
        """Go on from a snapshot in an engine of other options; the disk is the same."""
        self.note()
        self.engine.snapshot(self.path / "snapshot")
        self.engine._lower.close()
        self.engine = self._new_engine(least=max(SIZES))
        before = self.engine.restore(self.path / "snapshot")
        ended = self.parts.keys() - {output.request_id for output in before}
        assert ended <= self.aborted  # the engine that took the snapshot has their last words
        self.parts = {output.request_id: [output] for output in before}

    def note(self):
        """Count what an engine's figures, which end with it or with a resize, have seen."""
        stats = self.engine.stats()
        self.happened["swaps"] += stats.swaps
        self.happened["recomputed"] += stats.preemptions - stats.swaps
        self.happened["found below"] += stats.lower.counts.host_hits + stats.lower.counts.disk_hits

    def _new_engine(self, least=0):
        engine = tiny_engine(
            num_blocks=max(least, self.rng.choice(SIZES)),
            max_num_seqs=6,
            max_prefill_chunk=self.rng.choice([16, None]),
            contiguous_blocks=self.rng.random() < 0.5,
            host_cache_bytes=self.rng.choice([4, 8, 30]) * BLOCK_BYTES,
            disk_cache_path=self.path / "disk",
            disk_cache_bytes=60 * disk_tier.file_bytes(BLOCK_BYTES, 16),
            preemption=self.rng.choice(["swap", "auto", "recompute"]),
            link_bytes_per_s=1e9,
            prefill_tokens_per_s=1e4,
        )
        assert engine.kv_spec.block_bytes == BLOCK_BYTES
        return engine


def live(life):
    """Take random operations, and then steps until nothing is left."""
    for operation in range(OPERATIONS):
        dice = life.rng.random()
        if dice < 0.15 and len(life.parts) < 10:
            life.add(str(operation))
        elif dice < 0.16:
            life.abort()
        elif dice < 0.161:
            life.engine.swap_params(dict(life.engine._runner.params))
        elif dice < 0.168:
            life.resize()
        elif dice < 0.174:
            life.restart()
        else:
            life.step()
    while life.engine.has_unfinished():
        life.step()
    life.note()
    assert not life.parts and life.finished > 20
    assert life.engine.stats().blocks_used == 0


@pytest.mark.parametrize("seed", [2, 4])
def test_no_life_of_the_memory_changes_a_token(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(disk_tier, "FileIO", lambda: FaultyDisk(seed, share=0.1))
    life = Life(seed, tmp_path)
    live(life)
    life.engine._lower.close()
    assert all(life.happened.values()), life.happened
