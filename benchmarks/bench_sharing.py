"""Blocks saved by sharing: `python -m benchmarks.bench_sharing --model CHECKPOINT [--out FILE]`.

Parallel samples and beam searches of real prompts, as in section 6.3 of the PagedAttention paper
(Kwon et al., 2023): how many fewer blocks are in use than if every sequence had its own, averaged
over all steps. Prefix caching is off, so that different prompts share nothing. End of text is
ignored, so that every output has the same length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.bench_generate import prompts
from benchmarks.record import Figure, record
from pagedjax import LLM, BeamSearchParams, SamplingParams

WIDTHS = (2, 4, 6)


def measure(
    llm: LLM, token_ids: list[list[int]], params: SamplingParams | BeamSearchParams
) -> dict[str, Figure]:
    """Run all prompts at once and count the blocks after every step."""
    engine = llm.engine
    scheduler = engine._scheduler
    copied, preempted = scheduler.blocks.num_copied, scheduler.num_preemptions
    for number, prompt in enumerate(token_ids):
        engine.add_request(str(number), None, prompt, params)
    owned, used = [], []
    while engine.has_unfinished():
        engine.step()
        owned.append(sum(len(seq.blocks) for seq in scheduler.sequences()))
        used.append(scheduler.num_used_blocks)
    return {
        "prompts": len(token_ids),
        "mean_prompt_tokens": round(float(np.mean([len(ids) for ids in token_ids])), 1),
        "output_tokens": params.max_tokens,
        "block_size": engine.config.block_size,
        "saved_share": round(1.0 - sum(used) / sum(owned), 4),
        "peak_blocks": max(used),
        "peak_blocks_unshared": max(owned),
        "copied_blocks": scheduler.blocks.num_copied - copied,
        "preemptions": scheduler.num_preemptions - preempted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each output")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()

    llm = LLM(
        args.model,
        progress=False,
        prefix_caching=False,
        max_num_seqs=args.prompts * max(WIDTHS),
        max_model_len=1024,
    )
    assert llm.tokenizer is not None
    token_ids = [llm.tokenizer.encode(text) for text in prompts(args.prompts)]
    for width in WIDTHS:
        sampling = SamplingParams(n=width, seed=0, max_tokens=args.tokens, ignore_eos=True)
        beams = BeamSearchParams(beam_width=width, max_tokens=args.tokens, ignore_eos=True)
        for name, params in (("samples", sampling), ("beams", beams)):
            figures = measure(llm, token_ids, params)
            record("sharing", f"{name}_{width}", out=args.out, model=args.model.name, **figures)


if __name__ == "__main__":
    main()
