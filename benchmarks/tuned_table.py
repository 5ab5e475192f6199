"""Turn measured lines of `bench_kernels` into the table that the kernels look their sizes up in.

    python -m benchmarks.tuned_table benchmarks/results/decode_h200.jsonl > \\
        pallas_kernels/tuned/nvidia_h200.json

For every shape and batch size, each backend gets the configuration with the least geometric mean of
its times over the contexts measured, and the faster backend is marked.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONFIG = ("tile", "stages", "workers", "num_warps")


def table(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the table, ordered by shape, batch size and backend."""
    # shape and batch -> backend and configuration -> context -> best time
    times: dict[Any, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        if line["bench"] != "paged_decode" or line["case"].count(" ") != 3:
            continue  # neither lognormal lengths nor several rows
        heads, dtype, _, batch = line["case"].split()
        seqs, context = map(int, batch.split("x"))
        variant = (line["implementation"], *(line[name] for name in CONFIG))
        of_variant = times[(*map(int, heads.split(":")), dtype, seqs)][variant]
        of_variant[context] = min(line["median_us"], of_variant.get(context, math.inf))
    entries = []
    for (q_heads, kv_heads, head_dim, dtype, seqs), variants in sorted(times.items()):
        contexts = max((set(t) for t in variants.values()), key=len)
        complete = {v: t for v, t in variants.items() if contexts <= set(t)}
        cost = {v: math.prod(t[c] for c in contexts) for v, t in complete.items()}
        fastest = min(cost, key=cost.__getitem__)
        for backend in sorted({v[0] for v in cost}):
            best = min((v for v in cost if v[0] == backend), key=cost.__getitem__)
            entries.append({
                "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim,
                "kv_dtype": dtype, "seqs": seqs, "backend": backend,
                "fastest": backend == fastest[0],
                "config": dict(zip(CONFIG, best[1:], strict=True)),
            })  # fmt: skip
    return entries


def main() -> None:
    lines = [
        json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()
    ]
    rows = ",\n  ".join(json.dumps(entry) for entry in table(lines))
    print('{"decode": [\n  ' + rows + "\n]}")


if __name__ == "__main__":
    main()
