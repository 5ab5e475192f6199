"""A disk that is slow, full or broken costs an engine hits; never a token, nor room not allowed."""

import threading
from pathlib import Path

import numpy as np
import pytest

from pagedjax.engine import disk_tier
from tests.engine.test_lower_tiers import (
    BLOCK_BYTES,
    GREEDY,
    check_books,
    counts,
    engine_with,
    expected,
    fill_disk,
)
from tests.support.faulty_disk import FaultyDisk
from tests.support.tiny_engines import drain, random_prompts, serve, settle, tokens_of


class Slow(disk_tier.FileIO):
    """A disk that answers no read until told to."""

    def __init__(self):
        self.go_on = threading.Event()

    def read(self, path):
        assert self.go_on.wait(30)
        return super().read(path)


def test_what_a_slow_disk_brings_too_late_is_computed_and_its_files_stay(tmp_path, monkeypatch):
    """Late reads are misses, and once the disk is itself again the same files are hits."""
    engine, prompts = fill_disk(tmp_path)
    engine._lower.close()
    files = sorted(Path(tmp_path).rglob("*.kv"))
    slow = Slow()
    monkeypatch.setattr(disk_tier, "FileIO", lambda: slow)
    options = dict(num_blocks=40, disk_cache_path=tmp_path, disk_cache_bytes=1 << 20)
    again = engine_with(40, **options)
    again._lower._disk._patience_s = 0.05
    outputs = serve(again, prompts, GREEDY)
    assert tokens_of(outputs) == expected(0, (100, 110, 120, 90))
    assert counts(again).disk_hits == 0 < counts(again).failed_reads
    assert all(output.num_cached_tokens == 0 for output in outputs)
    slow.go_on.set()
    again._lower.close()
    assert sorted(Path(tmp_path).rglob("*.kv")) == files
    third = engine_with(40, **options)
    outputs = serve(third, prompts, GREEDY)
    assert tokens_of(outputs) == expected(0, (100, 110, 120, 90))
    assert counts(third).disk_hits > 10 and counts(third).failed_reads == 0
    third._lower.close()


@pytest.mark.parametrize("slowness", [0.0, 0.03])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_no_fault_of_the_disk_reaches_a_request(tmp_path, monkeypatch, slowness, preemption):
    monkeypatch.setattr(disk_tier, "FileIO", lambda: FaultyDisk(1, share=0.2, slowness=slowness))
    engine = engine_with(
        12,
        num_blocks=16,
        disk_cache_path=tmp_path,
        disk_cache_bytes=30 * disk_tier.file_bytes(BLOCK_BYTES, 16),
        preemption=preemption,
    )
    engine._lower._disk._patience_s = 0.05
    lengths = (100, 60, 120, 90, 80, 110, 70)
    prompts = random_prompts(lengths)
    want = dict(zip(map(tuple, prompts), expected(0, lengths), strict=True))
    rng = np.random.default_rng(0)
    for _ in range(6):
        some = [prompts[i] for i in rng.permutation(len(prompts))[:5]]
        for index, prompt in enumerate(some):
            engine.add_request(str(index), None, prompt, GREEDY)
        outputs = drain(engine, on_step=check_books(engine))
        for index, prompt in enumerate(some):
            assert outputs[str(index)].outputs[0].token_ids == want[tuple(prompt)]
    settle(engine)
    got = counts(engine)
    assert got.failed_spills > 0 and got.spilled > 0 and got.read + got.failed_reads > 0
    engine._lower.close()
    files = list(Path(tmp_path).rglob("*.kv"))
    assert sum(path.stat().st_size for path in files) <= engine.config.disk_cache_bytes * 1.5


class Undeletable(disk_tier.FileIO):
    """A disk that deletes nothing."""

    def delete(self, path):
        raise OSError(5, "injected")


def test_a_disk_that_deletes_nothing_gets_no_more_files_than_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "FileIO", Undeletable)
    limit = 10
    size = disk_tier.file_bytes(BLOCK_BYTES, 16)
    engine = engine_with(6, num_blocks=14, disk_cache_path=tmp_path, disk_cache_bytes=limit * size)
    for seed in range(4):
        for prompt in random_prompts((100, 110, 120), seed):
            serve(engine, [prompt], GREEDY)
            settle(engine)
    engine._lower.close()
    assert counts(engine).failed_spills > 0 < counts(engine).disk_evictions
    assert len(list(Path(tmp_path).rglob("*.kv"))) == limit


class Gated(disk_tier.FileIO):
    """A disk that writes nothing while its gate is closed."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def write(self, path, parts):
        assert self.gate.wait(30)
        super().write(path, parts)


def test_what_a_disk_is_too_slow_for_costs_no_file_its_place(tmp_path, monkeypatch):
    disk = Gated()
    monkeypatch.setattr(disk_tier, "FileIO", lambda: disk)
    limit = 20
    size = disk_tier.file_bytes(BLOCK_BYTES, 16)
    engine = engine_with(6, num_blocks=14, disk_cache_path=tmp_path, disk_cache_bytes=limit * size)

    def files():
        return {path.name for path in Path(tmp_path).rglob("*.kv")}

    for prompt in random_prompts((100, 110, 120, 100, 110, 120)):
        serve(engine, [prompt], GREEDY)
        settle(engine)
    before, failed = files(), counts(engine).failed_spills
    assert len(before) == limit
    disk.gate.clear()
    for prompt in random_prompts((100, 110, 120, 100, 110, 120), seed=1):
        serve(engine, [prompt], GREEDY)
    disk.gate.set()
    settle(engine)
    engine._lower.close()
    assert counts(engine).failed_spills - failed > 20
    assert len(files()) == limit and len(files() & before) == limit - 8
