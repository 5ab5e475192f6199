"""The load under one system prompt, and what its benchmark compares."""

import json
import sys
import weakref

import pytest

from benchmarks import bench_shared_prompt
from benchmarks.request_lists import random_prompts
from benchmarks.workloads import NAMED, PIECE, shared_prompt

SIZES = (
    "--shape tiny --dtype float32 --count 6 --shared 512 --own 20 --output-len 3 "
    "--max-num-seqs 3 --max-num-batched-tokens 128"
)


def lines_of(monkeypatch, capsys, options):
    monkeypatch.setattr(sys, "argv", ["bench_shared_prompt", *options.split()])
    bench_shared_prompt.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_requests_agree_in_the_system_prompt_and_in_nothing_after_it():
    shapes = shared_prompt(5, shared=2 * PIECE, own=40, output_len=7)
    prompts = random_prompts(shapes, vocab=10**6)
    assert {(len(p), s.prompt_len, s.output_len) for p, s in zip(prompts, shapes, strict=True)} == {
        (2 * PIECE + 40, 2 * PIECE + 40, 7)
    }
    assert len({tuple(prompt[: 2 * PIECE]) for prompt in prompts}) == 1
    assert len({prompt[2 * PIECE] for prompt in prompts}) == 5


def test_the_named_load_is_256_requests_under_2048_tokens():
    shapes = NAMED["shared-prompt"]()
    assert (len(shapes), {shape.prompt_len for shape in shapes}) == (256, {2048 + 64})
    assert len({shape.pieces[:4] for shape in shapes}) == 1
    assert len({shape.pieces for shape in shapes}) == 256


@pytest.mark.parametrize(("shared", "own"), [(0, 4), (500, 4), (512, 0), (512, PIECE + 1)])
def test_lengths_that_pieces_can_not_express_are_refused(shared, own):
    with pytest.raises(ValueError, match=rf"got shared={shared}, own={own}"):
        shared_prompt(2, shared=shared, own=own)


def test_the_system_prompt_is_computed_every_time_once_or_not_at_all(monkeypatch, capsys):
    """The shares found follow from the lengths; an engine is gone before the next one is made."""
    engines = []

    def make(*args):
        assert all(engine() is None for engine in engines), "two pools at once"
        engine = original(*args)
        engines.append(weakref.ref(engine))
        return engine

    original = bench_shared_prompt.Engine
    monkeypatch.setattr(bench_shared_prompt, "Engine", make)
    without, cold, warm = lines_of(monkeypatch, capsys, SIZES)
    assert len(engines) == 2
    assert [line["run"] for line in (without, cold, warm)] == ["without", "cold", "warm"]
    assert without["hit_share"] == 0
    assert 0 < cold["hit_share"] <= round(5 / 6 * 512 / 532, 4)  # the first one finds nothing
    assert warm["hit_share"] == round(512 / 532, 4)
    for line in (without, cold, warm):
        assert line["finished"] == line["requests"] == 6
        assert (line["compiles_after_warmup"], line["preemptions"]) == (0, 0)
    for line in (cold, warm):
        for part in ("p50", "p90", "p99", "mean"):
            name = f"ttft_{part}"
            speedup = without[f"{name}_ms"] / line[f"{name}_ms"]
            assert line[f"{name}_speedup"] == pytest.approx(speedup, abs=1e-3)


def test_a_run_that_is_broken_off_is_compared_with_nothing(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match=r"of 6 requests finished within 0\.05 s; want all"):
        lines_of(monkeypatch, capsys, f"{SIZES} --rate 3 --max-seconds 0.05")
