"""Whether a real model's outputs are right on this device.

    python -m benchmarks.check_golden --model CHECKPOINT --golden FILE [--out FILE]

The golden file holds prompts with the greedy tokens of the model, computed by transformers in
float32 from weights of bfloat16 (`tests/data/smollm2_golden.json`). One JSON line per dtype.

float32: every prompt is continued greedily alone, with all the others at once, in prefill chunks
of 16, and in a pool so small that requests are preempted. `alone` and its like count the prompts
whose tokens are the golden ones, or leave them only where the two best golden tokens are closer
than `--margin` in log-probability; there the sums' order may decide. `mean_abs_logprob_error` is
against the golden tokens' own.

bfloat16: `agreement` is the share of golden tokens that are the engine's own choice where all
tokens before them are given (teacher-forced).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.bench_kv_accuracy import agreement, logprobs, scored
from benchmarks.record import record
from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.engine.engine import Engine
from pagedjax.loading import LoadedModel, load_model

Case = dict[str, Any]
SMALL_POOL = 98  # blocks of 16 tokens: the longest golden prompt, and little more


def llm(model: LoadedModel, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_num_seqs": 32, "max_num_batched_tokens": 128, "max_model_len": 2048,
        "num_blocks": 400, "warm_up": False, "prefix_caching": False,
    }  # fmt: skip
    return LLM.from_engine(Engine(model, None, EngineConfig(**(settings | options))))


def same_tokens(tokens: Sequence[int], case: Case, margin: float) -> bool:
    """Whether these are the golden tokens, up to the first step that is too close to tell."""
    for got, want, top in zip(tokens, case["output_token_ids"], case["top5"], strict=False):
        if got != want:
            (first, best), (second, next_best) = top[:2]
            return best - next_best < margin and got in (first, second)
    return len(tokens) >= len(case["output_token_ids"])


def count_right(engine: LLM, cases: Sequence[Case], margin: float, max_tokens: int = 32) -> int:
    """Prompts with the golden tokens, all of them asked for at once."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.generate([case["prompt_token_ids"] for case in cases], params, progress=False)
    return sum(
        same_tokens(output.outputs[0].token_ids, case, margin)
        for output, case in zip(outputs, cases, strict=True)
    )


def golden_logprobs(cases: Sequence[Case]) -> np.ndarray:
    """Of all tokens but the first of each prompt, in the order of `logprobs`; NaN if not known."""
    found: list[float] = []
    for case in cases:
        found += case["prompt_logprobs"][1:]
        for token, top in zip(case["output_token_ids"], case["top5"], strict=True):
            found.append(dict(top).get(token, float("nan")))
    return np.array(found)


def float32_figures(model: LoadedModel, cases: Sequence[Case], margin: float) -> dict[str, Any]:
    longest_first = sorted(cases, key=lambda case: -len(case["prompt_token_ids"]))
    plain, small = llm(model), llm(model, num_blocks=SMALL_POOL)
    outputs = scored(plain, cases)
    error = np.abs(logprobs(outputs) - golden_logprobs(cases))
    return {
        "prompts": len(cases),
        "alone": sum(count_right(plain, [case], margin) for case in cases),
        "batched": count_right(plain, cases, margin),
        "chunked": count_right(llm(model, max_prefill_chunk=16), cases, margin),
        "preempted": count_right(small, longest_first, margin, max_tokens=112),
        "preemptions": small.engine.stats().preemptions,
        "agreement": round(agreement(outputs, cases), 5),
        "mean_abs_logprob_error": float(f"{np.nanmean(error):.3g}"),
        "max_abs_logprob_error": float(f"{np.nanmax(error):.3g}"),
    }


def bfloat16_figures(model: LoadedModel, cases: Sequence[Case]) -> dict[str, Any]:
    outputs = scored(llm(model), cases)
    tokens = sum(len(case["output_token_ids"]) for case in cases)
    return {
        "prompts": len(cases),
        "tokens": tokens,
        "agreement": round(agreement(outputs, cases), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in any format")
    parser.add_argument("--golden", type=Path, required=True, help="prompts with golden tokens")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--margin", type=float, default=2e-3, help="in log-probability")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    cases: list[Case] = json.loads(args.golden.read_text())["prompts"]
    stored = load_model(args.model, dtype="bfloat16")  # what the golden tokens were made from
    for dtype in args.dtypes:
        params = {name: jnp.asarray(x, dtype) for name, x in stored.params.items()}
        model = replace(stored, params=params)
        figures = (
            float32_figures(model, cases, args.margin)
            if dtype == "float32"
            else bfloat16_figures(model, cases)
        )
        record("golden", f"{args.model.name}, {dtype}", args.out, **figures)


if __name__ == "__main__":
    main()
