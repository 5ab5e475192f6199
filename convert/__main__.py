"""`python -m convert SRC DST`: convert a checkpoint from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from convert.checkpoint import DTYPES
from convert.conversion import convert

EXAMPLE = "example: python -m convert ~/models/SmolLM2-135M-Instruct ./smollm2 --dtype bfloat16"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the arguments say.

    Returns:
        0 when it worked, 2 for input that cannot be converted, 1 for any other failure.
    """
    parser = argparse.ArgumentParser(
        "convert", description="Convert a checkpoint to the native format.", epilog=EXAMPLE
    )
    parser.add_argument("src", help="Hugging Face directory, or a .gguf file")
    parser.add_argument("dst", help="directory to create")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: as stored")
    parser.add_argument("--overwrite", action="store_true", help="replace a native checkpoint")
    parser.add_argument(
        "--check", action="store_true", help="compare logits with transformers (needs PyTorch)"
    )
    options = parser.parse_args(arguments)
    try:
        report = convert(
            options.src,
            options.dst,
            dtype=options.dtype,
            overwrite=options.overwrite,
            check=options.check,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for note in report.notes:
        print(f"note: {note}")
    print(
        f"{report.destination}: {report.num_params / 1e6:.1f} M parameters in "
        f"{report.num_tensors} tensors, {report.nbytes / 1e6:.1f} MB"
    )
    if report.largest_difference is not None:
        print(f"largest logit difference from transformers: {report.largest_difference:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
