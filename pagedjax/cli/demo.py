"""`pagedjax demo`: fetch a small model and let it answer several prompts at once."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagedjax.cli.errors import reports_errors
from pagedjax.cli.generate import report_failures, show
from pagedjax.cli.terminal import STDERR, LiveAnswers, OrderedAnswers
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedjax.engine.stats import EngineStats

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue? Answer in two sentences.",
    "Write a haiku about the sea.",
    "Tell me a fun fact about octopuses.",
    "What is photosynthesis?",
)


@reports_errors
def demo(
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    fetch_only: Annotated[
        bool, typer.Option("--fetch-only", help="Only print the model's directory.")
    ] = False,
) -> None:
    """Fetch SmolLM2-135M-Instruct (once, about 90 MB) and answer six questions at once.

    Example: `pagedjax chat $(pagedjax demo --fetch-only)`
    """
    from pagedjax.demo import demo_model

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)  # before all that takes time
    with STDERR.status("looking for the demo model") as status:
        path = demo_model(status.update)
    if fetch_only:
        typer.echo(path)
        return
    from pagedjax.llm import LLM

    # Few step sizes, since each is compiled the first time.
    llm = LLM(path, max_num_seqs=8, max_num_batched_tokens=256, bucket_growth=8, max_model_len=1024)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    console = Console()
    is_live = console.is_terminal
    answers = LiveAnswers(QUESTIONS, console) if is_live else OrderedAnswers(QUESTIONS)
    started = time.monotonic()
    results = show(llm.stream_chat(conversations, params), answers, len(QUESTIONS))
    seconds = time.monotonic() - started
    typer.echo(f"\n{closing_line(results, seconds, llm.engine.stats())}")
    raise typer.Exit(report_failures(results))


def closing_line(results: list[RequestOutput], seconds: float, stats: EngineStats) -> str:
    """Speed, latency and memory of a run, in one line.

    Args:
        results: of all requests.
        seconds: from handing in the first prompt to the last token.
        stats: the engine's, taken afterwards.
    """
    tokens = sum(result.num_generated_tokens for result in results)
    waits = [result.timings.time_to_first_token for result in results]
    first = statistics.median([wait for wait in waits if wait is not None] or [0.0])
    return (
        f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s; "
        f"time to first token {first:.2f} s (median); "
        f"KV blocks in use at the peak {stats.blocks_peak} of {stats.blocks_total} "
        f"({stats.peak_block_utilisation:.1%})"
    )
