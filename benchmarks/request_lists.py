"""Lists of requests to serve to the end: named, from a JSON file or seeded; random prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.workloads import NAMED, PIECE, RequestShape, synthetic


def add_list_options(parser: argparse.ArgumentParser) -> None:
    """`--workload`, `--requests` and `--limit`."""
    parser.add_argument("--workload", choices=NAMED, nargs="+", default=[], help="named lists")
    parser.add_argument(
        "--requests", type=Path, nargs="+", default=[],
        help="more lists, as JSON files of {prompt_len, output_len}; without either: 128 seeded "
        "lognormal lengths",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="only the first so many requests of each")


def request_lists(
    names: Sequence[str], paths: Sequence[Path], limit: int | None
) -> dict[str, list[RequestShape]]:
    """The lists that the options ask for, by name.

    Args:
        names: of `workloads.NAMED`.
        paths: JSON lists of objects with `prompt_len` and `output_len`, and `arrival_s` or not;
            neither names nor paths is the seeded default.
        limit: how many of the first requests of each to keep; None keeps all.

    Raises:
        ValueError: a file holds something else, or no request.
    """
    lists = {name: NAMED[name]()[:limit] for name in names}
    lists |= {path.stem: read_requests(path)[:limit] for path in paths}
    for name, shapes in lists.items():
        if not shapes:
            raise ValueError(f"{name}: got no requests, want at least one")
    return lists or {"synthetic": synthetic(128)[:limit]}


def read_requests(path: Path) -> list[RequestShape]:
    """The requests of a JSON file.

    Raises:
        ValueError: it is not a list of objects with positive integer lengths.
    """
    rows = json.loads(path.read_text())
    wanted = "a list of {prompt_len, output_len}, both at least 1"
    if not isinstance(rows, list):
        raise ValueError(f"{path}: got {type(rows).__name__}, want {wanted}")
    shapes = []
    for index, row in enumerate(rows):
        lengths = [row.get(name) if isinstance(row, dict) else None for name in (
            "prompt_len", "output_len")]  # fmt: skip
        if not all(isinstance(length, int) and length >= 1 for length in lengths):
            raise ValueError(f"{path}: got {row} at {index}, want {wanted}")
        shapes.append(RequestShape(*lengths, float(row.get("arrival_s", 0.0))))
    return shapes


def random_prompts(shapes: Sequence[RequestShape], vocab: int, seed: int = 0) -> list[list[int]]:
    """Uniformly random token ids, the same ones for every contender.

    Prompts with `RequestShape.pieces` in common have these tokens in common.
    """
    rng = np.random.default_rng(seed)
    pieces: dict[int, list[int]] = {}

    def tokens(shape: RequestShape) -> list[int]:
        if not shape.pieces:
            return rng.integers(0, vocab, shape.prompt_len).tolist()
        for piece in shape.pieces:
            if piece not in pieces:
                pieces[piece] = rng.integers(0, vocab, PIECE).tolist()
        return [token for piece in shape.pieces for token in pieces[piece]][: shape.prompt_len]

    return list(map(tokens, shapes))


def longest(shapes: Sequence[RequestShape]) -> int:
    """Most tokens of a request, prompt and output together."""
    return max(shape.prompt_len + shape.output_len for shape in shapes)


def throughput(shapes: Sequence[RequestShape], seconds: float) -> dict[str, int | float]:
    """Figures of having served these requests to the end in so many seconds."""
    prompt = sum(shape.prompt_len for shape in shapes)
    output = sum(shape.output_len for shape in shapes)
    return {
        "requests": len(shapes),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(shapes) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 1),
        "total_tokens_per_s": round((prompt + output) / seconds, 1),
    }
