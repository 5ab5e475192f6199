"""What an engine does before its first request, so that none of them waits for it."""

from collections import Counter

import pytest

from pagedjax.engine.buckets import Bucket, Buckets
from pagedjax.engine.programs import BuildTimes
from pagedjax.engine.runner import Draw
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from tests.support.tiny_engines import compiles, random_prompts, serve, tiny_engine, tokens_of

KINDS_OF_DRAWS = ((False, False), (True, False), (True, True))  # full, penalties
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_every_program_that_any_request_can_need_is_launched_twice():
    """Once to load its kernels, once to capture them; penalties have memory of their own."""
    runner = tiny_engine(max_num_seqs=4, max_num_batched_tokens=32, warm_up=True)._runner
    launched = Counter()

    def counted(key, code):
        def call(*args):
            launched[key] += 1
            return code(*args)

        return call

    runner._compiled = {key: counted(key, code) for key, code in runner._compiled.items()}
    runner.launch_all()
    wanted = {key for key in runner._compiled if not (isinstance(key, Draw) and key.penalties)}
    assert launched.keys() == wanted > set(runner.buckets)
    assert min(launched.values()) == 2


def test_on_a_gpu_steps_whose_products_are_tried_out_come_first_and_decode_steps_among_them(
    monkeypatch,
):
    """They take longest to compile; a mixed step finds what its decode step has tried out."""
    runner = tiny_engine(max_num_seqs=256, max_num_batched_tokens=512)._runner
    monkeypatch.setattr(runner, "_platform", "gpu")
    runner.buckets = Buckets(256, 512, 2, 8, 128, 128)
    built = []
    monkeypatch.setattr(runner, "launch_all", lambda: None)
    monkeypatch.setattr(
        "pagedjax.engine.runner.build",
        lambda programs, **_: (built.extend(programs) or dict.fromkeys(programs), BuildTimes()),
    )
    runner.warm_up()
    steps = [(key.tokens, key.decode) for key in built if isinstance(key, Bucket)]
    tried = [(n, True) for n in (128, 64, 16, 8, 1)] + [(128, False)]
    assert steps == [*tried, (512, False), (256, False), *((n, True) for n in (256, 192, 32))]
    assert all(isinstance(key, Draw) for key in built[len(steps) :])


def test_on_a_gpu_products_are_tried_out_and_redraws_are_compiled_as_they_are(monkeypatch):
    """A redraw has no products, but dozens of fusions that would be tried out instead."""
    runner = tiny_engine(max_num_seqs=256, max_num_batched_tokens=256)._runner
    monkeypatch.setattr(runner, "_platform", "gpu")
    draws = [Draw(n, full, penalties) for n in (1, 256) for full, penalties in KINDS_OF_DRAWS]
    levels = {key: runner.program(key).options["xla_gpu_autotune_level"] for key in draws}
    assert set(levels.values()) == {0}
    steps = {key: runner.program(key).options for key in Buckets(256, 256, 2, 8, 128, 128)}
    assert {options["xla_gpu_autotune_level"] for options in steps.values()} == {2}
    untried = {
        key.tokens for key, o in steps.items() if o.get("xla_gpu_enable_triton_gemm") is False
    }
    assert untried == {32, 192, 256}


@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_are_captured_unless_they_are_not_wanted(monkeypatch, graphs):
    runner = tiny_engine(cuda_graphs=graphs)._runner
    keys = [*runner.buckets, Draw(1, full=False)]
    on_cpu = {str(runner.program(key).options) for key in keys}
    assert "graph" not in "".join(on_cpu)
    monkeypatch.setattr(runner, "_platform", "gpu")
    least = [runner.program(key).options.get("xla_gpu_graph_min_graph_size") for key in keys]
    assert least == [None if graphs else 2**31 - 1] * len(keys)


def test_launching_every_step_with_padding_compiles_nothing_and_changes_no_tokens():
    params = [GREEDY, SamplingParams(temperature=1.0, seed=1, top_k=5, max_tokens=5)] * 2
    prompts = random_prompts([1, 20, 40, 8])
    engine = tiny_engine(max_num_seqs=4, max_num_batched_tokens=32, warm_up=True)
    with compiles() as compiled:
        engine._runner.launch_all()
    assert compiled == []
    got = tokens_of(serve(engine, prompts, params))
    assert got == tokens_of(serve(tiny_engine(), prompts, params))
    assert engine.stats().compiles_after_warmup == 0


def test_nothing_compiles_after_warm_up():
    """A mixed run, watched by JAX's own event counter beside the engine's."""
    engine = tiny_engine(max_num_seqs=4, max_num_batched_tokens=32, warm_up=True)
    with compiles() as compiled:
        prompts = random_prompts([1, 3, 70, 15, 20, 40, 8], seed=7)
        params = [
            GREEDY,
            SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, max_tokens=5),
            SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, max_tokens=4),
            SamplingParams(n=2, max_tokens=6),
            BeamSearchParams(beam_width=3, max_tokens=6),
            SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1, 2), max_tokens=9),
            GREEDY,
        ]
        serve(engine, prompts, params)
    assert engine.stats().compiles_after_warmup == 0
    assert compiled == []


def test_a_compile_after_warm_up_is_counted():
    engine = tiny_engine(max_num_seqs=2, max_num_batched_tokens=16, warm_up=True)
    engine._runner._compiled.clear()
    serve(engine, [[1, 2, 3]], GREEDY)
    assert engine.stats().compiles_after_warmup > 0
