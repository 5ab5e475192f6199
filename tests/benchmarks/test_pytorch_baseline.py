"""The PyTorch contenders: padding, exact lengths, and a decode step that is the model's own."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks import pytorch_baseline, torch_models, torch_step  # noqa: E402
from benchmarks.request_lists import random_prompts  # noqa: E402
from benchmarks.shapes import SHAPES, StepBytes  # noqa: E402
from benchmarks.workloads import RequestShape  # noqa: E402

TINY = SHAPES["tiny"]
LIST = [RequestShape(5, 3, 0.0), RequestShape(9, 6, 0.0), RequestShape(2, 1, 0.0)]


def args_of(*options):
    return pytorch_baseline.options().parse_args(["generate", "--shape", "tiny", *options])


def test_prompts_are_padded_on_the_left():
    rows, mask = pytorch_baseline.left_padded([[7, 8, 9], [4]])
    assert rows == [[7, 8, 9], [0, 0, 4]]
    assert mask == [[1, 1, 1], [0, 0, 1]]


def test_static_batches_count_their_padding():
    """By hand: batches of two and one, computing 2 x (9 + 6) and 2 + 1 positions."""
    model = torch_models.hugging_face_model(TINY, "float32")
    prompts = random_prompts(LIST, TINY.vocab)
    figures = pytorch_baseline.run_generate(model, LIST, prompts, args_of("--batch", "2"))
    assert figures["complete"] and figures["requests"] == 3
    assert figures["output_tokens"] == 10
    assert figures["padding"] == round(1 - 26 / 33, 4)


def test_a_list_that_takes_too_long_is_broken_off(monkeypatch):
    """The clock moves a second per batch; two seconds are allowed."""
    clock = iter(range(100))
    monkeypatch.setattr(pytorch_baseline.time, "perf_counter", lambda: float(next(clock)))
    model = torch_models.hugging_face_model(TINY, "float32")
    args = args_of("--batch", "1", "--max-seconds", "2.5")
    prompts = random_prompts(LIST, TINY.vocab)
    figures = pytorch_baseline.run_generate(model, LIST, prompts, args)
    assert not figures["complete"]
    assert figures["requests"] == 2 and figures["output_tokens"] == 9


@pytest.mark.parametrize("changes", [{}, {"family": "llama", "qk_norm": False, "tied": True}])
def test_the_hand_written_step_computes_the_models_logits(changes):
    """Against transformers with its own cache, float32: other orders of sums, so 1e-4."""
    arch = dataclasses.replace(TINY, **changes)
    torch.manual_seed(0)
    model = torch_models.hugging_face_model(arch, "float32")
    tokens = torch.randint(0, arch.vocab, (3, 12))
    with torch.inference_mode():
        cached = model(tokens[:, :-1], use_cache=True).past_key_values
        wanted = model(tokens).logits[:, -1]
        step = torch_step.DecodeStep(model, arch)
        step.allocate(batch=3, context=12)
        for (keys, values), layer in zip(step.kv, cached.layers, strict=True):
            keys[:, :, :11], values[:, :, :11] = layer.keys, layer.values
        step.tokens.copy_(tokens[:, -1])
        got = step.logits()
        step.step()
    assert torch.allclose(got, wanted, atol=1e-4)
    assert (step.tokens == wanted.argmax(-1)).all()
    assert step.kv_bytes == 3 * 12 * arch.kv_elements_per_token * 4
    assert step.weight_bytes == StepBytes.of(arch, 4, batch=1, context=1).weights


def test_a_shape_that_transformers_would_compute_otherwise_is_refused():
    with pytest.raises(ValueError, match="want a plain llama or qwen3 shape"):
        torch_models.hugging_face_model(dataclasses.replace(TINY, qkv_bias=True), "float32")


def test_stretched_rotary_frequencies_are_passed_on():
    assert torch_models.rope_parameters(SHAPES["llama3.1-8b"]) == {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


def dense_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What PyTorch's ragged kernel computes, one sequence at a time; it has no CPU build."""
    assert tuple(window_size) == (-1, 0)  # causal, the last query sees the last key
    out = torch.zeros_like(q)
    starts = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for q_start, q_end, k_start, k_end in starts:
        if q_end == q_start:
            continue
        one = [x.transpose(0, 1) for x in (q[q_start:q_end], k[k_start:k_end], v[k_start:k_end])]
        queries, keys = q_end - q_start, k_end - k_start
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *one, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        out[q_start:q_end] = mixed.transpose(0, 1)
    return out


@pytest.mark.filterwarnings("default")  # transformers' own, of its serving thread
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_continuous_batching_serves_exact_lengths(attention, monkeypatch):
    import transformers.modeling_flash_attention_utils as flash
    from torch.nn.attention import varlen

    for name in ("_lazy_imports", "_loaded_implementation", "_flash_varlen_fn"):
        monkeypatch.setattr(flash, name, getattr(flash, name))  # put back afterwards
    monkeypatch.setattr(varlen, "varlen_attn", dense_varlen)
    model = torch_models.hugging_face_model(TINY, "float32")
    args = args_of(
        "--attention", attention, "--num-blocks", "32", "--max-batch-tokens", "256"
    )  # fmt: skip
    prompts = random_prompts(LIST, TINY.vocab)
    figures = pytorch_baseline.run_continuous(model, LIST, prompts, args)
    assert figures["complete"] and figures["output_tokens"] == 10
    assert figures["attention"] == attention
    assert ("flash" in figures["attention_path"]) == (attention == "varlen")


def test_every_step_case_is_one_line(tmp_path):
    args = args_of(
        "--dtype", "float32", "--cases", "1x8,2x9", "--steps", "1", "--repeats", "1",
        "--out", str(tmp_path / "lines"),
    )  # fmt: skip
    torch_step.run("tiny", TINY, args)
    assert len((tmp_path / "lines").read_text().splitlines()) == 2
