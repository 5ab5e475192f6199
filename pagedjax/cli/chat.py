"""`pagedjax chat`: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pagedjax.cli import options as opt
from pagedjax.cli.errors import complain, reports_errors
from pagedjax.cli.terminal import until_first
from pagedjax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedjax.llm import LLM

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C breaks an answer off"


@reports_errors
def chat(
    model: opt.Model,
    system: Annotated[str | None, typer.Option(help="The conversation's system message.")] = None,
    max_tokens: opt.MaxTokens = 1024,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    dtype: opt.Dtype = "auto",
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    block_size: opt.BlockSize = 16,
    num_blocks: opt.NumBlocks = None,
    memory_fraction: opt.MemoryFraction = None,
    max_model_len: opt.MaxModelLen = None,
    metrics_port: opt.MetricsPort = None,
) -> None:
    """Talk to a model; it remembers the conversation. One line is one message.

    Example: `pagedjax chat ./llama-1b --system "Answer in one sentence." --temperature 0.7`
    """
    chosen = opt.given(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    chosen["max_tokens"] = max_tokens
    SamplingParams(**chosen)  # bad values should not have to wait for the model
    from pagedjax.llm import LLM

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_fraction=memory_fraction,
        max_model_len=max_model_len,
        metrics_port=metrics_port,
        max_num_seqs=1,
        warm_up=False,  # steps are compiled as they are needed: the first answer comes sooner
        progress=sys.stderr.isatty(),
    )
    params = SamplingParams.from_generation(llm.engine.generation, **chosen)
    opening = [{"role": "system", "content": system}] if system else []
    converse(llm, params, opening)


def converse(llm: LLM, params: SamplingParams, opening: list[dict[str, str]]) -> None:
    """Read messages until the input ends. An answer that fails takes its message with it."""
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # line editing, where the platform has it
            importlib.import_module("readline")
        typer.echo(HELP, err=True)
        prompt = "> "
    messages = list(opening)
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            text = answer(llm, params, messages)
            if text is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})


def answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]]) -> str | None:
    """Stream one answer; returns its text, or None if there is none."""
    deltas = until_first(llm.stream_chat(messages, params))
    text, error = "", None
    try:
        for _, delta in deltas:
            error = delta.error
            for output in delta.outputs:
                text += output.text
                typer.echo(output.text, nl=False)
    except KeyboardInterrupt:
        deltas.close()
    typer.echo()
    if error is not None:
        complain(error)
        return None
    return text
