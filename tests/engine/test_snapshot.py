"""Requests and cache go on in another engine, or another process."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedjax.outputs import RequestOutput, TokenLogprobs
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from scheduler import invariants
from tests.support.echo_engine import ByteTokenizer
from tests.support.tiny_engines import (
    drain,
    random_prompts,
    serve,
    settle,
    tiny_engine,
    tiny_model,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, n=2)
SCORED = SamplingParams(
    temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=1
)
LENGTHS = [5, 40, 17, 60, 33]


def requests():
    prompts = random_prompts(LENGTHS)
    each = [GREEDY, GREEDY, SAMPLED, GREEDY, SCORED]
    return {
        str(i): (prompt, params)
        for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
    }


def add_all(engine):
    for request_id, (prompt, params) in requests().items():
        engine.add_request(request_id, None, prompt, params)


def run(engine, steps):
    """Deltas of so many steps, by request."""
    deltas = {}
    for _ in range(steps):
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def whole(before, after):
    """Tokens and log-probabilities of every completion, from deltas of two lives."""
    found = {}
    for request_id in requests():
        parts = [*before.get(request_id, []), *after.get(request_id, [])]
        joined = RequestOutput.joined(parts)
        found[request_id] = (
            [(output.token_ids, output.logprobs) for output in joined.outputs],
            joined.prompt_logprobs,
        )
    return found


def alike(got, wanted):
    """Equal but for the last bits of numbers, which hang on what else is in a step on some CPUs."""
    if isinstance(wanted, float):
        return math.isclose(got, wanted, rel_tol=1e-5, abs_tol=1e-5)
    if isinstance(wanted, TokenLogprobs):
        return alike(
            (got.token_id, got.logprob, got.top), (wanted.token_id, wanted.logprob, wanted.top)
        )
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(alike(got[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(got) == len(wanted) and all(map(alike, got, wanted))
    return got == wanted


def uninterrupted(model=None, **options):
    engine = tiny_engine(model, **options)
    add_all(engine)
    return whole(run(engine, 500), {})


def continued(engine):
    deltas = {}
    while engine.has_unfinished():
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8-values"}, {"prefix_caching": False}],
)
def test_continuations_are_those_of_an_engine_that_goes_on(tmp_path, options):
    wanted = uninterrupted(**options)
    for steps in (1, 3, 6, 12):
        engine = tiny_engine(**options)
        add_all(engine)
        before = run(engine, steps)
        engine.snapshot(tmp_path / "s")
        other = tiny_engine(**options)
        so_far = other.restore(tmp_path / "s")
        for output in so_far:
            told = [d for d in before.get(output.request_id, []) if d.outputs]
            for completion in output.outputs:
                tokens = [o.token_ids for d in told for o in d.outputs
                          if o.index == completion.index]  # fmt: skip
                assert completion.token_ids == tuple(t for part in tokens for t in part)
        assert alike(whole(before, continued(other)), wanted), steps
        assert whole(before, continued(engine)) == wanted, "the engine itself goes on, too"


@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ((20, 24), {}),
        ((None, None), {"host_cache_bytes": 1 << 20, "preemption": "swap", "num_blocks": 14}),
    ],
)
def test_windows_and_host_memory_change_nothing(tmp_path, windows, options):
    model = tiny_model(windows=windows)
    wanted = uninterrupted(model, **options)
    for steps in (7, 15):
        engine = tiny_engine(model, **options)
        add_all(engine)
        before = run(engine, steps)
        engine.snapshot(tmp_path / "s")
        other = tiny_engine(model, **options)
        other.restore(tmp_path / "s")
        found = whole(before, continued(other))
        for request_id, (completions, _) in wanted.items():
            tokens = [token_ids for token_ids, _ in found[request_id][0]]
            assert tokens == [token_ids for token_ids, _ in completions]
        invariants.check(other._scheduler)
        if options:
            engine.resize_pool(30)
            assert len(continued(engine)) > 0
            invariants.check(engine._scheduler)


def test_computed_tokens_are_kept_and_the_cache_survives(tmp_path):
    engine = tiny_engine()
    prompt = random_prompts([70])[0]
    engine.add_request("a", None, prompt, replace(GREEDY, max_tokens=4))
    drain(engine)
    engine.add_request("b", None, random_prompts([50], seed=3)[0], GREEDY)
    run(engine, 4)
    engine.snapshot(tmp_path / "s")
    other = tiny_engine(num_blocks=60)
    other.restore(tmp_path / "s")
    plan = other._scheduler.schedule()
    assert plan.counts.tolist() == [1]
    other.abort("b")
    other._scheduler.update(plan, np.zeros(plan.num_samples, np.int32))
    drain(other)
    other.add_request("c", None, prompt, GREEDY)
    assert drain(other)["c"].num_cached_tokens == 64


def test_what_lies_below_the_pool_is_found_after_a_restore(tmp_path):
    """On the disk of the engine that has ended, and in host memory of one that goes back."""
    options = dict(num_blocks=14, preemption="recompute", disk_cache_bytes=1 << 20)
    options |= dict(host_cache_bytes=6 * 4096, disk_cache_path=tmp_path / "disk")
    engine = tiny_engine(**options)
    assert engine.kv_spec.block_bytes == 4096
    prompts = random_prompts([100, 110, 120, 90], seed=5)
    params = replace(GREEDY, max_tokens=8)
    wanted = [tokens_of(serve(tiny_engine(), [prompt], params)) for prompt in prompts]
    for prompt in prompts * 2:
        serve(engine, [prompt], params)
        settle(engine)
    engine.snapshot(tmp_path / "s")
    engine._lower.close()
    other = tiny_engine(**options)
    for _ in range(2):  # the second time, other has content of its own in every tier
        before = other._scheduler.blocks.tiers.num_host_used
        other.restore(tmp_path / "s")
        assert other._scheduler.blocks.tiers.num_host_used == before
        for prompt, tokens in reversed(list(zip(prompts, wanted, strict=True))):
            assert tokens_of(serve(other, [prompt], params)) == tokens
            invariants.check(other._scheduler)
        hits = other.stats().hit_rates
        assert hits["disk"] > 0 < hits["pool"]
    other._lower.close()


def test_seeds_of_later_requests_go_on(tmp_path):
    engine = tiny_engine()
    engine.add_request("a", None, [1, 2, 3], SAMPLED)
    run(engine, 3)
    engine.snapshot(tmp_path / "s")
    other = tiny_engine()
    other.restore(tmp_path / "s")
    outputs = []
    for one in (engine, other):
        one.add_request("later", None, [5, 6], SAMPLED)
        outputs.append([o.token_ids for o in drain(one)["later"].outputs])
    assert outputs[0] == outputs[1]


def test_a_beam_search_begins_anew_and_ends_alike(tmp_path):
    search = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    engine = tiny_engine()
    engine.add_request("a", None, random_prompts([20])[0], search)
    run(engine, 4)
    engine.snapshot(tmp_path / "s")
    other = tiny_engine()
    other.restore(tmp_path / "s")
    ends = [[(o.token_ids, o.score) for o in drain(e)["a"].outputs] for e in (engine, other)]
    assert ends[0] == ends[1] and len(ends[0]) == 3
    with pytest.raises(ValueError, match="beam searches run"):
        engine.add_request("b", None, [1, 2, 3], search)
        engine.step()
        engine.resize_pool(50)


def test_snapshots_of_others_and_damaged_ones_are_refused(tmp_path):
    engine = tiny_engine()
    engine.add_request("a", None, random_prompts([40])[0], GREEDY)
    run(engine, 4)
    path = tmp_path / "s"
    engine.snapshot(path)
    with pytest.raises(ValueError, match="another model's weights: got digest '.*', wanted '"):
        tiny_engine(tiny_model(seed=1)).restore(path)
    with pytest.raises(ValueError, match="another model: got digest '.*', wanted '"):
        tiny_engine(tiny_model(layers=1, windows=(None,))).restore(path)
    kinds = [{"kv_cache_dtype": name} for name in ("int8", "int8-values")]
    for options in (*kinds, {"block_size": 32}):
        with pytest.raises(ValueError, match="another kind of KV cache: got .*, wanted '"):
            tiny_engine(**options).restore(path)
    with pytest.raises(ValueError, match="idle engine"):
        engine.restore(path)
    with pytest.raises(ValueError, match="is no snapshot"):
        tiny_engine().restore(tmp_path / "nothing")
    for name in ("blocks.1.bin", "state.json"):
        whole_file = (path / name).read_bytes()
        for content in (whole_file[:-1], whole_file[:-1] + b"\x07", b""):
            (path / name).write_bytes(content)
            message = rf"{name}' is damaged: got .*{len(content)},.*wanted .*{len(whole_file)},"
            with pytest.raises(ValueError, match=message):
                tiny_engine().restore(path)
        (path / name).write_bytes(whole_file)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))
    with pytest.raises(ValueError, match="wanted 'pagedjax-snapshot' version 2, got .* 1"):
        tiny_engine().restore(path)
    for name in ("files", "depends_on"):
        without = {key: value for key, value in manifest.items() if key != name}
        for damaged in (without, manifest | {name: None}, manifest | {name: []}):
            (path / "manifest.json").write_text(json.dumps(damaged))
            message = rf"manifest.json' is damaged: wanted an object '{name}', got (None|\[\])"
            with pytest.raises(ValueError, match=message):
                tiny_engine().restore(path)
    (path / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    with pytest.raises(ValueError, match="state.json' is damaged: got .*, wanted None"):
        tiny_engine().restore(path)


@pytest.mark.parametrize(
    ("manifest", "got"),
    [
        ('{"format": "pagedjax-checkpoint", "version": 1}', "got 'pagedjax-checkpoint'"),
        ("{}", "got None"),
        ("[]", "got no object"),
        ("half {", "got Expecting value"),
        (None, "got .*No such file"),
    ],
)
def test_only_a_snapshot_is_replaced(tmp_path, manifest, got):
    path = tmp_path / "checkpoint"
    (path / "params").mkdir(parents=True)
    (path / "params" / "weights").write_bytes(b"precious")
    if manifest is not None:
        (path / "manifest.json").write_text(manifest)
    wanted = "exists and is no snapshot: wanted manifest.json of format 'pagedjax-snapshot', "
    with pytest.raises(ValueError, match=wanted + got):
        tiny_engine().snapshot(path)
    assert (path / "params" / "weights").read_bytes() == b"precious"
    with pytest.raises(ValueError, match=wanted + "got .*Not a directory"):
        tiny_engine().snapshot(path / "params" / "weights")
    (path / "manifest.json").write_text('{"format": "pagedjax-snapshot", "version": 1}')
    tiny_engine().snapshot(path)
    assert not (path / "params").exists(), "a snapshot of any version"


def test_a_snapshot_replaces_an_earlier_one_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    engine = tiny_engine()
    engine.add_request("a", None, random_prompts([20])[0], GREEDY)
    for _ in range(3):
        engine.step()
        engine.snapshot(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    kept = (tmp_path / "s" / "state.json").read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk is full")))
    engine.step()
    with pytest.raises(OSError, match="disk is full"):
        engine.snapshot(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s" / "state.json").read_bytes() == kept


def test_a_snapshot_that_can_not_be_moved_to_its_place_leaves_the_earlier_one_there(
    tmp_path, monkeypatch
):
    engine = tiny_engine()
    engine.add_request("a", None, random_prompts([20])[0], GREEDY)
    engine.step()
    engine.snapshot(tmp_path / "s")
    kept = (tmp_path / "s" / "state.json").read_bytes()
    rename = Path.rename

    def refuse_drafts(self, target):
        if self.suffix == ".draft":
            raise OSError("the name is taken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_drafts)
    engine.step()
    for name in ("s", "another"):
        with pytest.raises(OSError, match="the name is taken"):
            engine.snapshot(tmp_path / name)
        assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s" / "state.json").read_bytes() == kept


def test_a_snapshot_with_a_request_too_long_for_an_engine_is_refused(tmp_path):
    engine = tiny_engine()
    add_all(engine)
    run(engine, 14)
    engine.snapshot(tmp_path / "s")
    small = tiny_engine(num_blocks=5)
    with pytest.raises(ValueError, match=r"has \d+ tokens, this engine serves sequences of 64"):
        small.restore(tmp_path / "s")
    assert not small.has_unfinished()


CHILD = """
import os, signal, sys
from tests.engine.test_snapshot import add_all, run
from tests.support.tiny_engines import tiny_engine

engine = tiny_engine()
add_all(engine)
for request_id, deltas in run(engine, 7).items():
    for delta in deltas:
        for output in delta.outputs:
            print(request_id, output.index, *output.token_ids)
engine.snapshot(sys.argv[1])
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_requests_survive_a_kill(tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == -9, done.stderr
    tokens = {}
    for line in done.stdout.splitlines():
        request_id, index, *new = line.split()
        tokens.setdefault((request_id, int(index)), []).extend(map(int, new))
    engine = tiny_engine()
    engine.restore(tmp_path / "s")
    for request_id, deltas in continued(engine).items():
        for delta in deltas:
            for output in delta.outputs:
                tokens.setdefault((request_id, output.index), []).extend(output.token_ids)
    wanted = {
        (request_id, index): list(token_ids)
        for request_id, (completions, _) in uninterrupted().items()
        for index, (token_ids, _) in enumerate(completions)
    }
    assert tokens == wanted


@pytest.mark.parametrize("keep_stop", [True, False])
def test_restored_outputs_are_complete_though_samples_had_ended(tmp_path, keep_stop):
    """Samples end at different tokens, of different reasons; the engine moves twice."""
    params = SamplingParams(
        n=8, seed=3, temperature=1.5, max_tokens=20, stop=["a", "e", "x", "bc"],
        stop_token_ids=(40, 41), include_stop_str_in_output=keep_stop,
        ignore_eos=True,
    )  # fmt: skip

    def engine():
        return tiny_engine(tokenizer=ByteTokenizer())

    def start():
        one = engine()
        one.add_request("a", None, random_prompts([20], seed=8)[0], params)
        return one

    whole = drain(start())["a"]
    assert {type(output.stop_reason) for output in whole.outputs} == {int, str, type(None)}
    moved_with_ended = 0
    for steps in range(2, 19, 3):
        first = start()
        run(first, steps)
        first.snapshot(tmp_path / "s")
        second = engine()
        second.restore(tmp_path / "s")
        run(second, 1)
        second.snapshot(tmp_path / "t")
        third = engine()
        (said,) = third.restore(tmp_path / "t")
        moved_with_ended += any(output.finish_reason for output in said.outputs)
        joined = RequestOutput.joined([said, *continued(third)["a"]])
        assert joined.outputs == whole.outputs
    assert moved_with_ended > 2


def test_priorities_survive(tmp_path):
    """The urgent one, which has not run yet, is served first by the engine that goes on."""
    prompts = random_prompts([30, 20, 10])
    engine = tiny_engine(max_num_seqs=1)
    for index, (prompt, priority) in enumerate(zip(prompts, (2, 1, -5), strict=True)):
        engine.add_request(str(index), None, prompt, GREEDY, priority=priority)
    engine.snapshot(tmp_path / "s")
    other = tiny_engine(max_num_seqs=1)
    other.restore(tmp_path / "s")
    for one in (engine, other):
        ended = [
            delta.request_id
            for _ in range(300)
            for delta in (one.step() if one.has_unfinished() else [])
            if delta.finished
        ]
        assert ended == ["2", "1", "0"]
