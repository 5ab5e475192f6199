"""Arrivals, latencies and goodput of the serving benchmark, and one run of it over a tiny model."""

import asyncio
import json

import numpy as np
import pytest

from benchmarks import bench_serving
from benchmarks.bench_serving import Served, at_rate, concurrency, latencies, poisson, replay
from benchmarks.request_lists import random_prompts
from benchmarks.shapes import SHAPES, random_model
from benchmarks.workloads import PIECE, RequestShape, mooncake_trace, trace
from pagedjax import AsyncLLM, EngineConfig
from pagedjax.engine.engine import Engine

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(
        dtype="float32", num_blocks=60, max_num_seqs=4, max_num_batched_tokens=32,
        max_model_len=128, bucket_growth=32,
    )  # fmt: skip
    return Engine(random_model(TINY, "float32"), None, config)


def served(due, *seen, finished=True):
    return Served(due=due, sent=due + 0.001, seen=list(seen), tokens=len(seen), finished=finished)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_one():
    shapes = [RequestShape(1, 1, 0.0)] * 4000
    timed = poisson(shapes, 8.0)
    gaps = np.diff([shape.arrival_s for shape in timed])
    # 4000 gaps: their mean is within 5 % of 1/8 at three sigma, their deviation likewise
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.07)
    assert timed[0].arrival_s == 0
    assert poisson(shapes, 8.0) == timed


def test_a_trace_keeps_its_bursts_at_another_rate():
    shapes = [RequestShape(5, 7, at) for at in (10.0, 10.0, 11.0, 14.0)]
    timed = at_rate(shapes, 3.0)
    assert [shape.arrival_s for shape in timed] == pytest.approx([0, 0, 0.25, 1.0])
    assert [(s.prompt_len, s.output_len) for s in timed] == [(5, 7)] * 4
    with pytest.raises(ValueError, match="all requests of the trace arrive at once"):
        at_rate(shapes[:2], 1.0)


def test_latencies_by_hand():
    """First tokens after 0.1 and 0.3 s; intervals 10, 10, 10 and 50 ms; a third is broken off."""
    done = [served(0.0, 0.1, 0.11, 0.12, 0.13), served(1.0, 1.3, 1.35)]
    figures = latencies([*done, served(1.1, 1.2, finished=False)], ttft_ms=200, itl_ms=40)
    assert (figures["requests"], figures["finished"]) == (3, 2)
    assert figures["seconds"] == 1.35
    assert figures["finished_per_s"] == round(2 / 1.35, 3)
    assert figures["output_tokens_per_s"] == round(6 / 1.35, 1)
    assert figures["ttft_p50_ms"] == pytest.approx(200)
    assert figures["ttft_p99_ms"] == pytest.approx(298)  # linear between the two
    assert figures["e2e_mean_ms"] == pytest.approx(240)
    assert figures["itl_p50_ms"] == pytest.approx(10)
    assert figures["itl_mean_ms"] == pytest.approx(20)
    assert figures["tpot_mean_ms"] == pytest.approx(30)
    assert figures["late_p90_ms"] == pytest.approx(1)
    assert figures["goodput_per_s"] == round(1 / 1.35, 3)
    assert figures["good_share"] == round(1 / 3, 4)


def test_both_bounds_make_a_request_bad():
    slow_start, stalls, good = (
        served(0.0, 0.25, 0.26), served(0.0, 0.1, 0.11, 0.16), served(0.0, 0.1),
    )  # fmt: skip
    figures = latencies([slow_start, stalls, good], ttft_ms=200, itl_ms=40)
    assert figures["good_share"] == round(1 / 3, 4)
    assert latencies([good], 200, 40)["good_share"] == 1  # one token has no interval
    assert "itl_p50_ms" not in latencies([good], 200, 40)


def test_nothing_finished_is_an_error():
    with pytest.raises(ValueError, match="none of 1 requests finished"):
        latencies([served(0.0, 0.1, finished=False)], 200, 40)


def test_concurrency_counts_open_requests():
    assert concurrency([served(0.0, 1.0), served(0.5, 2.0), served(1.0, 3.0)]) == 2
    assert concurrency([served(0.0, 1.0), served(0.2, 0.9), served(0.3, 0.4)]) == 3


def test_requests_are_sent_when_due_and_every_token_is_seen(engine):
    shapes = [RequestShape(6, 4, 0.0), RequestShape(20, 1, 0.05), RequestShape(9, 7, 0.3)]
    prompts = random_prompts(shapes, TINY.vocab)

    async def run():
        async with AsyncLLM.from_engine(engine) as llm:
            return await replay(llm, shapes, prompts, max_seconds=30)

    result = asyncio.run(run())
    assert [one.tokens for one in result] == [4, 1, 7]
    assert [len(one.seen) for one in result] == [4, 1, 7]  # a step brings one token
    assert all(one.finished and one.due <= one.sent <= one.seen[0] for one in result)
    assert [one.due - result[0].due for one in result] == pytest.approx([0, 0.05, 0.3])
    assert latencies(result, 1e6, 1e6)["good_share"] == 1


def test_a_rate_that_takes_too_long_is_broken_off(engine):
    """100 tokens of ten sequences, four at a time, take many steps more than 50 ms allow."""
    shapes = [RequestShape(6, 100, 0.0)] * 10 + [RequestShape(6, 100, 9.0)]
    prompts = random_prompts(shapes, TINY.vocab)

    async def run():
        async with AsyncLLM.from_engine(engine) as llm:
            result = await replay(llm, shapes, prompts, max_seconds=0.05)
            return result, await llm.stats()

    result, stats = asyncio.run(run())
    assert len(result) == 10  # the last one was due after the end
    assert not all(one.finished for one in result)
    assert stats.num_running + stats.num_waiting == 0  # all others were aborted


def test_mooncake_requests_share_the_tokens_of_the_ids_they_share(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": PIECE + 3, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 2 * PIECE, "output_length": 0, "hash_ids": [0, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = shapes = trace(path)
    assert first == RequestShape(PIECE + 3, 5, 0.0, (0, 1))
    assert (second.output_len, second.arrival_s) == (1, 1.5)
    one, two = random_prompts(shapes, 50_000)
    assert (len(one), len(two)) == (PIECE + 3, 2 * PIECE)
    assert one[:PIECE] == two[:PIECE]
    assert one[PIECE:] != two[PIECE : PIECE + 3]
    assert random_prompts(shapes, 50_000, seed=1)[0] != one
    assert mooncake_trace(path, 1) == [first]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 9}', "in line 1, want"),
        ("a.jsonl", json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1,
                                "hash_ids": [0]}), "got 1 ids for 600 tokens in line 1"),
        ("a.jsonl", "", "got no requests"),
        ("a.txt", "", "want a trace named .csv or .jsonl, got '.txt'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        trace(path)


def test_one_load_is_chosen_and_cut(tmp_path):
    path = tmp_path / "lens.json"
    path.write_text(json.dumps([{"prompt_len": n, "output_len": 1} for n in (5, 900, 6, 7)]))
    parse = bench_serving.options().parse_args
    options = ["--rates", "3", "--requests", str(path), "--longest", "100", "--limit", "2"]
    name, shapes = bench_serving.requests(parse(options))
    assert (name, [shape.prompt_len for shape in shapes]) == ("lens", [5, 6])
    with pytest.raises(ValueError, match="want one list of requests, got"):
        bench_serving.requests(parse([*options, "--workload", "short"]))
    with pytest.raises(ValueError, match="want at least 2 requests, got 0"):
        bench_serving.requests(parse([*options[:-4], "--longest", "2"]))
