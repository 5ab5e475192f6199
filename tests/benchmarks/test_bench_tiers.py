"""The benchmarks of the tiers measure what they say, on sizes that mean nothing."""

import json
import sys

import pytest

from benchmarks import bench_offload, bench_preemption


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
