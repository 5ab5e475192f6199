"""The benchmark of the scheduler, its workloads and its records."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_scheduler
from benchmarks.record import record
from benchmarks.workloads import RequestShape, azure_trace, synthetic
from scheduler import Request, Scheduler, SchedulerConfig, StopRules

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_a_trace_is_read_and_starts_again_where_it_ended(tmp_path: Path):
    path = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9305900,396,109"]
    path.write_text("\n".join([HEADER, *rows]))
    first, second = RequestShape(374, 44, 0.0), RequestShape(396, 109, 4.25)
    assert azure_trace(path) == [first, second]
    assert azure_trace(path, 3) == [first, second, RequestShape(374, 44, 4.25)]
    assert azure_trace(path, 1) == [first]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("when,tokens\n1,2\n")
    with pytest.raises(ValueError, match=r"got columns \['when', 'tokens'\], want .*TIMESTAMP"):
        azure_trace(path)
    path.write_text(HEADER + "\n")
    with pytest.raises(ValueError, match="got no requests, want at least one"):
        azure_trace(path)


def test_synthetic_requests_follow_from_the_seed():
    shapes = synthetic(500, seed=3, max_len=100, requests_per_s=10.0)
    assert shapes == synthetic(500, seed=3, max_len=100, requests_per_s=10.0)
    assert shapes != synthetic(500, seed=4, max_len=100, requests_per_s=10.0)
    assert {1 <= shape.prompt_len <= 50 and 1 <= shape.output_len <= 50 for shape in shapes} == {
        True
    }
    arrivals = [shape.arrival_s for shape in shapes]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals) and 30 < arrivals[-1] < 80


def test_a_record_is_one_json_line_with_its_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "lines.jsonl"
    record("some", "case", out=out, median_us=1.5)
    record("some", "other", out=out, median_us=2.5)
    lines = out.read_text().splitlines()
    assert capsys.readouterr().out.splitlines() == lines
    world = json.loads(lines[0])
    assert (world["bench"], world["case"], world["median_us"]) == ("some", "case", 1.5)
    assert world["python"] == sys.version.split()[0]
    assert {"device", "numpy", "commit", "command"} <= world.keys()
    assert "/" not in world["command"]


def test_the_simulation_serves_every_token_of_the_workload():
    shapes = synthetic(60, max_len=400)
    config = SchedulerConfig(num_blocks=60, max_model_len=400, max_num_seqs=8)
    figures = bench_scheduler.bench_trace(shapes, config)
    # the last token of each request is sampled but never computed
    least = sum(shape.prompt_len + shape.output_len - 1 for shape in shapes)
    assert figures["requests"] == 60
    assert figures["tokens"] >= least
    assert figures["preemptions"] > 0


def test_the_decode_case_times_full_steps():
    figures = bench_scheduler.bench_decode(3, 20, prefix_caching=True)
    assert figures["median_us_per_step"] >= figures["median_us_per_seq"] > 0


def test_the_cost_of_prefix_caching_is_that_of_the_same_steps():
    decode = bench_scheduler.caching_cost_of_decode(3, 40)
    assert (decode["steps"], decode["mean_seqs_per_step"]) == (40, 3.0)
    shapes = synthetic(40, max_len=400)
    config = SchedulerConfig(num_blocks=900, max_model_len=400, max_num_seqs=8)
    for figures in (decode, bench_scheduler.caching_cost_of_trace(shapes, config)):
        added = figures["with_us_per_step"] - figures["without_us_per_step"]
        assert figures["added_us_per_step"] == pytest.approx(added, abs=0.02)
        assert figures["one_percent_ms"] == pytest.approx(added * 1e-3 / 0.01, abs=2e-3)


def test_the_cost_is_refused_where_a_prefix_is_found():
    config = SchedulerConfig(
        num_blocks=900, max_model_len=400, max_num_seqs=1
    )  # one after the other
    clocks = {}
    for caching in (False, True):
        scheduler = Scheduler(dataclasses.replace(config, prefix_caching=caching))
        clocks[caching] = bench_scheduler.Clock(scheduler)
        for name in "ab":
            rules = StopRules(max_tokens=3)
            scheduler.add(Request(request_id=name, prompt_token_ids=[5] * 100, stop=rules))
    loops = {name: bench_scheduler.decoding(clock, 12) for name, clock in clocks.items()}
    with pytest.raises(AssertionError, match="not the same steps|a prefix was found"):
        bench_scheduler.bench_caching_cost(clocks, loops)
