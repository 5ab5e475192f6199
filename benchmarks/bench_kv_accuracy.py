"""What a compressed KV cache costs in accuracy, on a real model.

    python -m benchmarks.bench_kv_accuracy --model CHECKPOINT --golden FILE [--out FILE]

The golden file holds prompts with the greedy tokens of the uncompressed model in float32
(`tests/data/smollm2_golden.json`). Each of its prompts, continued by its golden tokens, is scored
by an engine whose KV cache has the named dtype:

- `perplexity` over all tokens but the first of each prompt, prompts and golden tokens together;
- `agreement`: share of the golden tokens that are the engine's own choice where all the tokens
  before them are given (teacher-forced);
- `mean_abs_logprob_error` of these tokens against the engine with an uncompressed cache.

Weights and activations are the same everywhere, `--dtype`; the KV cache "auto" is stored in it.
Every engine calibrates itself by its built-in text, not by these prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import record
from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.config import DTYPES, KV_CACHE_DTYPES
from pagedjax.frontend import weights_dtype


def scored(llm: LLM, cases: Sequence[dict[str, Any]]) -> list[RequestOutput]:
    """Every prompt with its golden tokens, and what the engine thinks of each of them."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    prompts = [case["prompt_token_ids"] + case["output_token_ids"] for case in cases]
    return llm.generate(prompts, params, progress=False)


def logprobs(outputs: Sequence[RequestOutput]) -> np.ndarray:
    """Log-probabilities of all tokens but the first of each prompt."""
    entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    return np.array([entry.logprob for entry in entries if entry is not None])


def agreement(outputs: Sequence[RequestOutput], cases: Sequence[dict[str, Any]]) -> float:
    """Share of the golden tokens that are the likeliest ones where they stand."""
    chosen = [
        entry.top[0][0] == entry.token_id
        for output, case in zip(outputs, cases, strict=True)
        for entry in (output.prompt_logprobs or ())[len(case["prompt_token_ids"]) :]
        if entry is not None
    ]
    return float(np.mean(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="native or HF checkpoint")
    parser.add_argument("--golden", type=Path, required=True, help="prompts with golden tokens")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights")
    parser.add_argument("--kv", nargs="+", choices=KV_CACHE_DTYPES, default=KV_CACHE_DTYPES)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    cases = json.loads(args.golden.read_text())["prompts"]
    weights = weights_dtype(args.dtype) or "stored"
    plain = None
    for kv_cache_dtype in args.kv:
        llm = LLM(
            args.model, dtype=args.dtype, kv_cache_dtype=kv_cache_dtype, max_num_seqs=64,
            max_num_batched_tokens=64, num_blocks=400, max_model_len=2048, warm_up=False,
            prefix_caching=False, progress=False,
        )  # fmt: skip
        outputs = scored(llm, cases)
        found = logprobs(outputs)
        plain = found if plain is None else plain
        record(
            "kv_accuracy",
            f"{args.model.name}, {weights} weights, {llm.engine.kv_spec.dtype_name} KV",
            out=args.out,
            kv_bytes_per_token=llm.engine.kv_spec.block_bytes // llm.engine.kv_spec.block_size,
            tokens=len(found),
            perplexity=round(float(np.exp(-found.mean())), 5),
            agreement=round(agreement(outputs, cases), 5),
            mean_abs_logprob_error=round(float(np.abs(found - plain).mean()), 6),
        )


if __name__ == "__main__":
    main()
