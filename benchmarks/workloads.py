"""Request lengths and arrivals, seeded or from a trace file."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Lengths in tokens, and the arrival in seconds after the first one."""

    prompt_len: int
    output_len: int
    arrival_s: float


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
