"""Prompts at once through the engine, against transformers' `generate` on the same device.

    python -m benchmarks.bench_generate --model CHECKPOINT [--prompts 32] [--tokens 64] [--out FILE]

The same weights, dtype and threads three times: this engine with all prompts at once;
`generate` with one prompt after another; `generate` with all prompts in one left-padded batch.
Greedy, end of text ignored, so that every output has the same length. Each contender runs
`--repeats` times in turn, interleaved, and its best run counts; on a shared machine only the ratios
mean anything. Start-up, compilation and loading are left out of all three.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import record
from benchmarks.torch_models import hugging_face_model

TOPICS = (
    "the tides", "a steam engine", "how bread rises", "prime numbers", "the colour of the sky",
    "honey bees", "a suspension bridge", "the water cycle",
)  # fmt: skip
FORMS = (
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "List three facts about {}, each on its own line, and say which of them surprises people most.",
    "A visitor to a museum stops before an exhibit about {} and asks the guide a question. The "
    "guide thinks for a moment, smiles, and gives an answer that the visitor will remember for "
    "years. Write down what the guide says, beginning with a short greeting.",
)


def prompts(count: int) -> list[str]:
    """Prompts of roughly 5 to 60 tokens."""
    return [
        FORMS[index % len(FORMS)].format(TOPICS[index // len(FORMS) % len(TOPICS)])
        for index in range(count)
    ]


def engine_contender(model: Path, tokens: int, texts: list[str], dtype: str) -> Callable[[], int]:
    """Runs all prompts through a warm engine; returns the generated tokens."""
    from pagedjax import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, max_num_seqs=len(texts), prefix_caching=False, progress=False,
        max_model_len=1024,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run() -> int:
        results = llm.generate(texts, params, progress=False)
        return sum(result.num_generated_tokens for result in results)

    return run


def transformers_model(model: Path, dtype: str) -> tuple[Any, Any]:
    """The same weights in transformers: the native checkpoint's, written into its own module."""
    import torch
    from transformers import AutoTokenizer

    from pagedjax.loading import load_model

    loaded = load_model(model, dtype=dtype)
    arch = loaded.arch
    module = hugging_face_model(arch, dtype)
    state = {}
    for name, value in hugging_face_tensors(loaded.params, arch):
        state[name] = torch.from_numpy(np.array(value, np.float32)).to(getattr(torch, dtype))
    missing, unexpected = module.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ValueError(f"weights do not fit: {missing=}, {unexpected=}")
    module.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(loaded.tokenizer_dir, padding_side="left")
    return module, tokenizer


def hugging_face_tensors(params, arch):
    """`(Hugging Face name, array)` of every tensor."""
    group, embed = arch.group, arch.embed
    yield "model.embed_tokens.weight", params["embed.table"]
    yield "model.norm.weight", params["norm.scale"]
    if not arch.tied:
        yield "lm_head.weight", params["unembed.table"]
    for i in range(arch.layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        qkv = params[ours + "attention.qkv"]
        for name, part in (
            ("q", qkv[:, :group]), ("k", qkv[:, group]), ("v", qkv[:, group + 1])
        ):  # fmt: skip
            yield f"{theirs}self_attn.{name}_proj.weight", part.reshape(-1, embed)
        yield f"{theirs}self_attn.o_proj.weight", params[ours + "attention.out"].reshape(embed, -1)
        gate_up = params[ours + "mlp.gate_up"]
        yield f"{theirs}mlp.gate_proj.weight", gate_up[0]
        yield f"{theirs}mlp.up_proj.weight", gate_up[1]
        yield f"{theirs}mlp.down_proj.weight", params[ours + "mlp.down"]
        yield f"{theirs}input_layernorm.weight", params[ours + "attention_norm.scale"]
        yield f"{theirs}post_attention_layernorm.weight", params[ours + "mlp_norm.scale"]


def transformers_contenders(
    module: Any, tokenizer: Any, tokens: int, texts: list[str]
) -> dict[str, Callable[[], int]]:
    """`generate` one prompt at a time, and in one padded batch."""
    import torch

    def generate(batch: list[str]) -> int:
        inputs = tokenizer(batch, return_tensors="pt", padding=True).to(module.device)
        with torch.inference_mode():
            out = module.generate(
                **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        return len(batch) * (out.shape[1] - inputs["input_ids"].shape[1])

    return {
        "transformers, one after another": lambda: sum(generate([text]) for text in texts),
        "transformers, one padded batch": lambda: generate(texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="native checkpoint; default: the demo model")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="generated per prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None, help="of torch; default: all cores")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    args = parser.parse_args()

    import torch

    from pagedjax.demo import demo_model

    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.model or demo_model(print)
    texts = prompts(args.prompts)
    module, tokenizer = transformers_model(model, args.dtype)
    contenders = {"pagedjax, all at once": engine_contender(model, args.tokens, texts, args.dtype)}
    contenders |= transformers_contenders(module, tokenizer, args.tokens, texts)

    best: dict[str, float] = dict.fromkeys(contenders, 0.0)
    for _ in range(args.repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            generated = run()
            best[name] = max(best[name], generated / (time.perf_counter() - start))
            assert generated == args.prompts * args.tokens
    ours, alone, padded = best.values()
    for name, rate in best.items():
        print(f"{name:34s} {rate:8.1f} tokens/s   engine is {ours / rate:5.2f} x")
    record(
        "generate", f"{args.prompts}_prompts_{args.tokens}_tokens", out=args.out,
        model=model.name, dtype=args.dtype, threads=torch.get_num_threads(),
        engine_tokens_per_s=round(ours, 1), one_by_one_tokens_per_s=round(alone, 1),
        padded_batch_tokens_per_s=round(padded, 1), ratio_to_one_by_one=round(ours / alone, 2),
        ratio_to_padded_batch=round(ours / padded, 2),
    )  # fmt: skip


if __name__ == "__main__":
    main()
