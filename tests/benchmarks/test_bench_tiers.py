"""The benchmarks of the tiers measure what they say, on sizes that mean nothing."""

import json
import sys

import numpy as np
import pytest

from benchmarks import bench_offload, bench_preemption
from benchmarks.shapes import SHAPES
from pagedjax import EngineConfig
from pagedjax.engine.kv_pool import kv_spec


def lines_of(monkeypatch, capsys, module, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_copy_benchmark_moves_the_bytes_that_it_reports(monkeypatch, capsys):
    sizes = ["--shape", "tiny", "--dtype", "float32", "--blocks", "9", "--repeats", "1"]
    store, load, overlap = lines_of(monkeypatch, capsys, bench_offload, *sizes)
    for line in (store, load):
        assert line["bytes"] == 9 * line["block_bytes"] == 9 * 2 * 2 * 2 * 16 * 16 * 4
        assert line["link_share"] == pytest.approx(line["plain_ms"] / line["blocks_ms"], abs=0.01)
    assert overlap["both_ms"] > 0


def test_the_copy_benchmark_moves_neighbours_or_any_blocks():
    spec = kv_spec(SHAPES["tiny"], EngineConfig(), num_blocks=40, dtype=np.dtype(np.float32))
    anywhere, neighbours = (
        bench_offload.Bench(spec, neighbours=flag).stores[:, 0].tolist() for flag in (False, True)
    )
    assert neighbours == list(range(1, 21))
    assert len(set(anywhere)) == 20 and 0 not in anywhere
    assert sorted(anywhere) != anywhere


def test_the_preemption_benchmark_preempts_under_every_policy(monkeypatch, capsys):
    options = (
        "--shape tiny --dtype float32 --lengths 32 64 --requests 8 --prompt-len 40 --output-len "
        "100 --max-num-seqs 4 --max-num-batched-tokens 64 --host-gb 0.01"
    )
    lines = lines_of(monkeypatch, capsys, bench_preemption, *options.split())
    assert [line["blocks"] for line in lines[:2]] == [2, 4]
    recompute, swap, _ = lines[2:]
    assert recompute["preemptions"] > 0 == recompute["swaps"]
    assert swap["swaps"] == swap["preemptions"] > 0
    assert all(line["output_tokens"] == 800 for line in lines[2:])
    assert all(line["compiles_after_warmup"] == 0 for line in lines[2:])


def test_lengths_that_the_quarter_does_not_hold_are_refused(monkeypatch, capsys):
    options = (
        "--shape tiny --dtype float32 --lengths 32 300 --requests 8 --prompt-len 40 --output-len "
        "100 --host-gb 0.01"
    )
    with pytest.raises(ValueError, match="want lengths below 288 tokens.*got 300"):
        lines_of(monkeypatch, capsys, bench_preemption, *options.split())
