"""Request lengths and arrivals: named loads, seeded ones, and those of trace files."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

PIECE = 512  # tokens of a prompt that share an id in Mooncake's traces


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request is, but for its tokens.

    Attributes:
        prompt_len: tokens.
        output_len: tokens.
        arrival_s: seconds after the first request.
        pieces: an id for every `PIECE` tokens of the prompt; where requests agree in ids from the
            start on, they agree in tokens. Empty: nothing in common with others.
    """

    prompt_len: int
    output_len: int
    arrival_s: float
    pieces: tuple[int, ...] = ()


def synthetic(
    count: int,
    *,
    seed: int = 0,
    prompt_median: float = 600.0,
    prompt_sigma: float = 1.0,
    output_median: float = 130.0,
    output_sigma: float = 0.8,
    max_len: int = 8192,
    requests_per_s: float | None = None,
) -> list[RequestShape]:
    """Lognormal lengths and Poisson arrivals.

    Args:
        count: how many requests.
        seed: the same seed gives the same requests.
        prompt_median: median prompt length in tokens; `sigma` is that of the logarithm.
        prompt_sigma: spread of the prompt lengths.
        output_median: median output length in tokens.
        output_sigma: spread of the output lengths.
        max_len: prompt and output are clipped to half of it each.
        requests_per_s: rate of arrival; None: all are there at the start.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(np.log(prompt_median), prompt_sigma, count)
    outputs = rng.lognormal(np.log(output_median), output_sigma, count)
    arrivals = np.zeros(count)
    if requests_per_s is not None:
        arrivals = np.cumsum(rng.exponential(1 / requests_per_s, count))
        arrivals -= arrivals[0]
    return [
        RequestShape(int(prompt), int(output), float(arrival))
        for prompt, output, arrival in zip(
            prompts.clip(1, max_len // 2), outputs.clip(1, max_len // 2), arrivals, strict=True
        )
    ]


def azure_trace(path: Path, count: int | None = None) -> list[RequestShape]:
    """An Azure LLM inference trace: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

    Source of the format: github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace 2023.

    Args:
        path: the CSV file.
        count: how many requests; a shorter trace starts again where it ended. None: as it is.

    Raises:
        ValueError: a column is missing, or there is no row.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if not wanted <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: got columns {reader.fieldnames}, want {sorted(wanted)}")
        rows = [
            (
                # seven digits after the point, of which fromisoformat reads six
                datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row in reader
        ]
    if not rows:
        raise ValueError(f"{path}: got no requests, want at least one")
    length_s = rows[-1][0] - rows[0][0]
    shapes: list[RequestShape] = []
    for index in range(len(rows) if count is None else count):
        turn, at = divmod(index, len(rows))
        time, prompt_len, output_len = rows[at]
        arrival = time - rows[0][0] + turn * length_s
        shapes.append(RequestShape(max(prompt_len, 1), max(output_len, 1), arrival))
    return shapes


def mooncake_trace(path: Path, count: int | None = None) -> list[RequestShape]:
    """A Mooncake trace: JSON lines of timestamp (milliseconds), lengths, and ids of prompt pieces.

    Source of the format: github.com/kvcache-ai/Mooncake, FAST25-release/traces.

    Args:
        path: the file.
        count: how many of its first requests; None: all.

    Raises:
        ValueError: a field is missing, or there is no row.
    """
    shapes = []
    with path.open() as file:
        for number, line in enumerate(file):
            if len(shapes) == count:
                break
            row = json.loads(line)
            wanted = ("timestamp", "input_length", "output_length", "hash_ids")
            if not set(wanted) <= set(row):
                raise ValueError(f"{path}: got {sorted(row)} in line {number + 1}, want {wanted}")
            arrival_ms, prompt_len, output_len, pieces = (row[name] for name in wanted)
            if len(pieces) != -(-prompt_len // PIECE):
                raise ValueError(
                    f"{path}: got {len(pieces)} ids for {prompt_len} tokens in line {number + 1}, "
                    f"want one for every {PIECE}"
                )
            shapes.append(
                RequestShape(prompt_len, max(output_len, 1), arrival_ms / 1e3, tuple(pieces))
            )
    if not shapes:
        raise ValueError(f"{path}: got no requests, want at least one")
    return shapes


def trace(path: Path, count: int | None = None) -> list[RequestShape]:
    """A trace file, by its ending: `.csv` is Azure's form, `.jsonl` Mooncake's.

    Raises:
        ValueError: another ending, or `azure_trace` or `mooncake_trace` refuses it.
    """
    readers = {".csv": azure_trace, ".jsonl": mooncake_trace}
    if path.suffix not in readers:
        raise ValueError(f"{path}: want a trace named .csv or .jsonl, got {path.suffix!r}")
    return readers[path.suffix](path, count)


def _same(count: int, prompt_len: int, output_len: int) -> list[RequestShape]:
    return [RequestShape(prompt_len, output_len, 0.0)] * count


def _mixed() -> list[RequestShape]:
    """Half short, half long, with spread lengths, shuffled."""
    rng = random.Random("0-mixed")
    shapes = []
    for _ in range(128):
        shapes.append(RequestShape(rng.randint(64, 192), rng.randint(64, 192), 0.0))
        shapes.append(RequestShape(rng.randint(1536, 2048), rng.randint(64, 512), 0.0))
    rng.shuffle(shapes)
    return shapes


def _sharegpt() -> list[RequestShape]:
    """Lognormal lengths, about those of conversations in ShareGPT."""
    rng = random.Random("0-sharegpt")

    def length(median: float, sigma: float, most: int) -> int:
        return min(max(int(rng.lognormvariate(math.log(median), sigma)), 4), most)

    return [RequestShape(length(160, 1.0, 2048), length(190, 0.8, 1024), 0.0) for _ in range(512)]


def _nano() -> list[RequestShape]:
    """The load of nano-vllm's benchmark: lengths uniform in 100 to 1024.

    Its generator also draws the prompts' tokens between their lengths, so these are drawn here too.
    """
    rng = random.Random(0)
    prompts = []
    for _ in range(256):
        tokens = rng.randint(100, 1024)
        for _ in range(tokens):
            rng.randint(0, 10000)
        prompts.append(tokens)
    return [RequestShape(prompt, rng.randint(100, 1024), 0.0) for prompt in prompts]


def shared_prompt(
    count: int = 256, *, shared: int = 2048, own: int = 64, output_len: int = 32
) -> list[RequestShape]:
    """Questions under one system prompt: the same first tokens, then each its own.

    Args:
        count: how many requests.
        shared: tokens that all of them begin with.
        own: tokens that follow, different for each.
        output_len: tokens of each answer.

    Raises:
        ValueError: `shared` is not a multiple of `PIECE`, or `own` is not within 1 to `PIECE`.
    """
    if shared < PIECE or shared % PIECE or not 1 <= own <= PIECE:
        raise ValueError(
            f"want shared a positive multiple of {PIECE} and own within 1 to {PIECE}, got "
            f"{shared=}, {own=}"
        )
    system = tuple(range(shared // PIECE))
    return [
        RequestShape(shared + own, output_len, 0.0, (*system, len(system) + index))
        for index in range(count)
    ]


# Loads that others can draw again, all there at the start.
NAMED: dict[str, Callable[[], list[RequestShape]]] = {
    "short": lambda: _same(512, 128, 128),
    "long": lambda: _same(128, 2048, 256),
    "mixed": _mixed,
    "sharegpt": _sharegpt,
    "nano": _nano,
    "long-context": lambda: _same(8, 32512, 256),
    "long-prefill": lambda: _same(4, 32768, 1),
    "shared-prompt": shared_prompt,
}
