"""The named shapes, the request lists and the pure parts of the engine's benchmarks."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import bench_offline, bench_step, random_engine
from benchmarks.bench_step import Case
from benchmarks.flops import matmul_flops_per_s, request_flops
from benchmarks.request_lists import longest, random_prompts, request_lists, throughput
from benchmarks.shapes import SHAPES, StepBytes, parameter_count, random_model
from benchmarks.workloads import NAMED, RequestShape
from pagedjax import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.models import param_shapes

TINY = SHAPES["tiny"]


@pytest.mark.parametrize(
    ("shape", "millions", "kv_bytes_per_token"),
    [("llama2-13b", 13015.4, 819200), ("llama3.1-8b", 8030.0, 131072),
     ("qwen3-0.6b", 596.0, 114688)],
)  # fmt: skip
def test_a_named_shape_has_the_published_size(shape, millions, kv_bytes_per_token):
    """Published counts leave the norms out, under a tenth of a percent."""
    arch = SHAPES[shape]
    assert parameter_count(arch) / 1e6 == pytest.approx(millions, rel=1e-3)
    one = StepBytes.of(arch, 2, batch=1, context=1)
    assert one.kv == kv_bytes_per_token


def test_a_step_reads_an_embedding_table_only_as_the_output_projection():
    """By hand: two tables of 13B, one of them not read; Qwen's one is both."""
    untied, tied = SHAPES["llama2-13b"], SHAPES["qwen3-0.6b"]
    moved = StepBytes.of(untied, 2, batch=3, context=5)
    assert moved.weights == 2 * (parameter_count(untied) - 32000 * 5120)
    assert moved.total == moved.weights + 15 * 819200
    assert StepBytes.of(tied, 2, batch=1, context=1).weights == 2 * parameter_count(tied)


def test_a_random_model_is_complete_scaled_and_seeded():
    model, again, other = (random_model(TINY, "bfloat16", seed) for seed in (1, 1, 2))
    assert {name: x.shape for name, x in model.params.items()} == param_shapes(TINY)
    assert {str(x.dtype) for x in model.params.values()} == {"bfloat16"}
    for name, value in model.params.items():
        array = np.asarray(value, np.float32)
        assert (array == np.asarray(again.params[name], np.float32)).all()
        if name.endswith("scale"):
            assert (array == 1).all()
        else:
            # All inputs are 64 wide but the MLP's output, whose are 128; 2 % is 3 sigma.
            inputs = 128 if name.endswith("down") else 64
            assert array.std() * inputs**0.5 == pytest.approx(1, rel=0.03), name
            assert (array != np.asarray(other.params[name], np.float32)).any()
    first, second = (model.params[f"layers.{i}.attention.out"] for i in range(2))
    assert (first != second).any()


def test_a_list_is_read_from_json_and_cut(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([
        {"prompt_len": 3, "output_len": 9, "arrival_s": 0.5}, {"prompt_len": 8, "output_len": 1},
    ]))  # fmt: skip
    shapes = request_lists([], [path], None)["mine"]
    assert shapes == [RequestShape(3, 9, 0.5), RequestShape(8, 1, 0.0)]
    assert request_lists([], [path], 1) == {"mine": shapes[:1]}
    assert longest(shapes) == 12
    assert len(request_lists([], [], 5)["synthetic"]) == 5
    assert [len(prompt) for prompt in random_prompts(shapes, 50)] == [3, 8]
    assert random_prompts(shapes, 50) == random_prompts(shapes, 50)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompt_len": 3}, "got dict, want a list"),
        ([{"prompt_len": 3}], "at 0, want a list"),
        ([{"prompt_len": 3, "output_len": 0}], "at 0, want a list"),
        ([4], "got 4 at 0"),
        ([], "got no requests"),
    ],
)
def test_a_file_that_is_no_request_list_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        request_lists([], [path], None)


def test_named_lists_are_those_that_others_measured():
    """Totals of nano-vllm's load as its authors publish them; the others by their definition."""
    totals = {
        name: (len(s), sum(x.prompt_len for x in s), sum(x.output_len for x in s))
        for name, s in request_lists(list(NAMED), [], None).items()
    }
    assert totals["nano"] == (256, 142827, 133966)
    assert totals["short"] == (512, 512 * 128, 512 * 128)
    assert totals["long"] == (128, 128 * 2048, 128 * 256)
    assert totals["long-context"][1] // 8 + 256 == 32768
    mixed = NAMED["mixed"]()
    assert (
        sum(x.prompt_len <= 192 for x in mixed) == sum(x.prompt_len >= 1536 for x in mixed) == 128
    )
    assert NAMED["mixed"]() == mixed and NAMED["sharegpt"]() == NAMED["sharegpt"]()
    assert totals["mixed"][1:] == (245825, 53895)
    assert totals["sharegpt"][1:] == (127436, 130765)


def test_operations_are_counted_by_hand_for_a_tiny_model():
    """Three positions and two draws of the tiny shape, one matrix after another."""
    weights = 2 * ((4 + 2 * 2) * 16 * 64 + 64 * 4 * 16 + 2 * 128 * 64 + 64 * 128)
    norms = 2 * (2 * 64 + 2 * 16) + 64
    visible = 1 + 2 + 3  # keys that the three queries see
    wanted = 2 * 3 * (weights + norms) + 2 * 2 * 512 * 64 + visible * 4 * 2 * 4 * 16
    assert request_flops(TINY, [RequestShape(2, 2, 0.0)]) == wanted
    assert request_flops(TINY, [RequestShape(2, 2, 0.0)] * 3) == 3 * wanted
    with pytest.raises(ValueError, match="full attention in every layer"):
        request_flops(dataclasses.replace(TINY, windows=(None, 8)), [RequestShape(2, 2, 0.0)])


def test_a_prompt_of_32k_on_the_8b_shape_takes_738_tera_operations():
    """6.98 G weights in the layers, twice per position; attention as 32 x 4 x 4096 x n^2 / 2."""
    flops = request_flops(SHAPES["llama3.1-8b"], [RequestShape(32768, 1, 0.0)])
    assert flops == pytest.approx(2 * 6.98e9 * 32768 + 32 * 4 * 4096 * 32768**2 / 2, rel=1e-3)


def test_the_rate_of_matrix_products_is_measured():
    assert matmul_flops_per_s(64, "float32") > 1e6


def test_rates_count_finished_work_over_time():
    figures = throughput([RequestShape(3, 9, 0.0), RequestShape(8, 1, 0.0)], 4.0)
    assert figures["requests_per_s"] == 0.5
    assert figures["output_tokens_per_s"] == 2.5
    assert figures["total_tokens_per_s"] == 5.2  # 5.25, to one digit


def test_cases_are_named_or_a_product():
    args = SimpleNamespace(cases=None, batches="1,8", contexts="16,32")
    assert list(map(str, bench_step.chosen_cases(args))) == ["1x16", "8x16", "1x32", "8x32"]
    args.cases = "32x4000"
    assert bench_step.chosen_cases(args) == [Case(32, 4000)]
    assert Case(3, 33).blocks(16) == 9
    for text in ("32", "x4", "0x4", "4x", "ax4"):
        with pytest.raises(ValueError, match="BATCHxCONTEXT"):
            Case.parse(text)


def test_a_measured_step_decodes_every_sequence_at_its_last_position():
    plan = bench_step.decode_plan(Case(3, 33), num_blocks=12, block_size=16, max_blocks=5)
    assert plan.seq_lens().tolist() == [33] * 3
    assert plan.positions().tolist() == [32] * 3
    assert plan.feed_rows.tolist() == plan.sample_rows().tolist() == [0, 1, 2]
    used = plan.block_tables[:, :3]
    assert np.unique(used).size == 9 and used.min() >= 1 and used.max() < 12
    assert (plan.block_tables[:, 3:] == 0).all()


def test_a_measured_step_feeds_its_own_tokens_and_compiles_once():
    """From the same random cache, a step that reads other tokens draws other ones."""
    cases = [Case(2, 20), Case(4, 33)]
    model = random_model(TINY, "float32")
    runner, num_blocks, max_blocks = bench_step.make_runner(
        model, cases, block_size=16, implementation=None
    )
    assert (num_blocks, max_blocks) == (13, 3)
    launch = bench_step.step_launcher(
        runner, cases[1], num_blocks=num_blocks, block_size=16, max_blocks=max_blocks
    )
    drawn = [np.asarray(launch().token_ids) for _ in range(3)]
    assert drawn[0].shape == (4,)
    assert (drawn[0] != drawn[1]).any()
    compiled = list(runner._compiled.values())
    assert len(compiled) == 1
    assert bench_step.saturated_seconds(launch, 2) > 0
    assert bench_step.caller_seconds(launch, 2) > 0
    assert bench_step.host_seconds(launch) > 0
    assert list(runner._compiled.values()) == compiled


def test_the_pool_of_a_measured_step_is_random_in_every_layer():
    model = random_model(TINY, "float32")
    runner, *_ = bench_step.make_runner(model, [Case(2, 20)], block_size=16, implementation=None)
    first, second = (np.asarray(layer) for layer in runner._pool)
    assert first.std() == pytest.approx(1, rel=0.05)
    assert (first != second).any()


def test_the_offline_benchmark_serves_exact_lengths_and_reports_the_run_alone():
    shapes = [RequestShape(20, 3, 0.0), RequestShape(5, 6, 0.0), RequestShape(40, 1, 0.0)]
    config = EngineConfig(
        dtype="float32", num_blocks=6, max_num_seqs=2, max_num_batched_tokens=32,
        max_model_len=64, bucket_growth=32, prefix_caching=False,
    )  # fmt: skip
    engine = Engine(random_model(TINY, "float32"), None, config)
    random_engine.warm(engine)
    prompts = random_prompts(shapes, TINY.vocab)
    for _ in range(2):  # the second run's figures are its own too
        before = engine.stats().steps
        seconds, watch = bench_offline.serve(engine, shapes, prompts)
        figures = bench_offline.figures(engine, watch)
        assert seconds >= sum(watch.step_s) > 0
        assert figures["steps"] == engine.stats().steps - before > 0
    assert figures["peak_running"] == 2
    assert 0 < figures["mean_kv_utilisation"] <= figures["peak_kv_utilisation"] <= 1
    # 2 layers, keys and values, 2 heads of 16, 16 positions, 4 bytes
    assert figures["kv_pool_bytes"] == 5 * 2 * 2 * 2 * 16 * 16 * 4
    # Two sequences of a model with 4096 positions; 5 blocks of 16 are in use at most.
    assert figures["contiguous_kv_bytes"] == 2 * 4096 * 2 * 2 * 2 * 16 * 4
    assert figures["kv_saving"] == pytest.approx(
        1 - 16 * round(5 * figures["peak_kv_utilisation"]) / (2 * 4096), abs=1e-4
    )
    assert figures["compiles_after_warmup"] == 0
    assert figures["peak_device_bytes"] is None  # a CPU does not say


def test_waste_is_the_share_of_allocated_positions_without_a_token(monkeypatch):
    """By hand: 20 prompt tokens in two blocks of 16, then one more each step until 31."""
    monkeypatch.setattr(bench_offline, "WASTE_EVERY", 1)
    config = EngineConfig(
        dtype="float32", num_blocks=6, max_num_seqs=1, max_num_batched_tokens=32,
        max_model_len=64, warm_up=False,
    )  # fmt: skip
    engine = Engine(random_model(TINY, "float32"), None, config)
    shapes = [RequestShape(20, 13, 0.0)]
    _, watch = bench_offline.serve(engine, shapes, random_prompts(shapes, TINY.vocab))
    assert watch.slots == [32] * 12
    assert watch.unused == list(range(12, 0, -1))
    figures = bench_offline.figures(engine, watch)
    assert figures["peak_kv_waste"] == 0.375
    assert figures["mean_kv_waste"] == round(78 / 384, 4)


def test_an_output_of_another_length_is_no_measurement():
    class Short(Engine):
        def add_request(self, request_id, prompt, prompt_token_ids, params, **options):
            fewer = dataclasses.replace(params, max_tokens=2)
            super().add_request(request_id, prompt, prompt_token_ids, fewer, **options)

    config = EngineConfig(
        dtype="float32", num_blocks=6, max_num_seqs=2, max_num_batched_tokens=32,
        max_model_len=64, bucket_growth=32, warm_up=False,
    )  # fmt: skip
    engine = Short(random_model(TINY, "float32"), None, config)
    with pytest.raises(RuntimeError, match="request 0: got 2 tokens, wanted 3"):
        bench_offline.serve(engine, [RequestShape(4, 3, 0.0)], [[1, 2, 3, 4]])


def test_the_pytorch_baselines_load_without_jax():
    """JAX in the same process would take the GPU's memory."""
    code = (
        "import sys; from benchmarks import pytorch_baseline as p; p.SHAPES['tiny']; "
        "print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
