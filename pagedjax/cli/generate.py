"""`pagedjax generate`: answer prompts from the command line, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedjax.cli import options as opt
from pagedjax.cli.errors import FAILED, complain, reports_errors
from pagedjax.cli.jsonl import json_line
from pagedjax.cli.terminal import STDERR, Answers, OrderedAnswers, progress_bar, until_first
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedjax.llm import LLM, Deltas


@reports_errors
def generate(
    model: opt.Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="`-` is all of standard input as one prompt."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(help="One prompt per line, empty lines left out; - is standard input."),
    ] = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message to the assistant.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per prompt, in order.")
    ] = False,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    n: Annotated[int, typer.Option(help="Completions of each prompt; above 1 needs --json.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Alternatives per token to report, 0 to 20; needs --json.")
    ] = None,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = None,
    memory_fraction: opt.MemoryFraction = None,
    max_model_len: opt.MaxModelLen = None,
    metrics_port: opt.MetricsPort = None,
) -> None:
    """Complete prompts, all of them at once; text streams as it comes.

    Exit code 1 if any request failed, 2 for bad input.

    Example: `pagedjax generate ./llama-1b --file prompts.txt --max-tokens 64 --json > out.jsonl`
    """
    if (n > 1 or logprobs is not None) and not as_json:
        raise ValueError("--n above 1 and --logprobs need --json")
    sampling = opt.given(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    sampling |= {"max_tokens": max_tokens, "n": n, "logprobs": logprobs}
    SamplingParams(**sampling)  # bad values should not have to wait for the model
    texts = read_prompts(prompts or [], file)
    engine = opt.given(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_fraction=memory_fraction,
        max_model_len=max_model_len,
        metrics_port=metrics_port,
    )
    raise typer.Exit(run(model, engine, texts, sampling, as_chat=as_chat, as_json=as_json))


def run(
    model: str,
    engine: dict[str, Any],
    texts: list[str],
    sampling: dict[str, Any],
    *,
    as_chat: bool,
    as_json: bool,
) -> int:
    """Load the model and answer the prompts; returns the exit code."""
    from pagedjax.llm import LLM

    rows = rows_wanted(len(texts) * sampling["n"])
    # For a few sequences, compiling steps as they are needed takes less time than all of them.
    llm = LLM(
        model, **engine, max_num_seqs=rows, warm_up=rows is None, progress=sys.stderr.isatty()
    )
    params = SamplingParams.from_generation(llm.engine.generation, **sampling)
    deltas = until_first(start(llm, texts, params, as_chat=as_chat))
    if as_json:
        return report_failures(print_json(deltas, len(texts)))
    headings = [f"## {one_line(text)}" if len(texts) > 1 else "" for text in texts]
    return report_failures(show(deltas, OrderedAnswers(headings), len(texts)))


def read_prompts(arguments: list[str], file: str | None, *, kind: str = "prompt") -> list[str]:
    """The prompts, or texts of another `kind`, of the command line and of a file.

    Raises:
        ValueError: there are none, the file is not text, or standard input is asked for twice.
    """
    if file == "-" and "-" in arguments or arguments.count("-") > 1:
        raise ValueError("standard input can be read only once")
    prompts = [sys.stdin.read() if text == "-" else text for text in arguments]
    if file is not None:
        try:
            lines = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        # `splitlines` would divide a prompt at a form feed, or at a line separator of Unicode, too.
        prompts += [line for line in lines.split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"no {kind}: give one as an argument, by --file, or - for standard input")
    return prompts


def rows_wanted(num_sequences: int) -> int | None:
    """Sequences per step for so many in all; None, the engine's own choice, for more than a few.

    A power of two, so that a run with another number of prompts finds its steps in the
    compilation cache.
    """
    return 1 << (num_sequences - 1).bit_length() if num_sequences <= 16 else None


def start(llm: LLM, texts: list[str], params: SamplingParams, *, as_chat: bool) -> Deltas:
    """Begin to answer the prompts."""
    if not as_chat:
        return llm.stream(texts, params)
    return llm.stream_chat([[{"role": "user", "content": text}] for text in texts], params)


def show(deltas: Deltas, answers: Answers, count: int) -> list[RequestOutput]:
    """Show answers as they come; returns the whole results."""
    parts: list[list[RequestOutput]] = [[] for _ in range(count)]
    with answers:
        for index, delta in deltas:
            parts[index].append(delta)
            for output in delta.outputs:
                answers.add(index, output.text)
            if delta.finished:
                answers.finish(index)
    return [RequestOutput.joined(part) for part in parts]


def print_json(deltas: Deltas, count: int) -> list[RequestOutput]:
    """Print each result as a line, once it and those before it are complete."""
    parts: list[list[RequestOutput]] = [[] for _ in range(count)]
    results: list[RequestOutput] = []
    with progress_bar(STDERR) as bar:
        task = bar.add_task("answers", total=count)
        for index, delta in deltas:
            parts[index].append(delta)
            bar.advance(task, int(delta.finished))
            while len(results) < count and parts[len(results)] and parts[len(results)][-1].finished:
                result = RequestOutput.joined(parts[len(results)])
                typer.echo(json_line(len(results), result))
                results.append(result)
    return results


def report_failures(results: list[RequestOutput]) -> int:
    """Name the requests that failed on standard error; returns the exit code."""
    failed = [(index, result) for index, result in enumerate(results) if result.error is not None]
    for index, result in failed:
        complain(f"prompt {index + 1}: {result.error}")
    return FAILED if failed else 0


def one_line(text: str, width: int = 72) -> str:
    """The beginning of `text` as a heading."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 1]}…"
