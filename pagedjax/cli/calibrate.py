"""`pagedjax calibrate`: measure what a compressed KV cache has to hold, once per checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedjax.cli import options as opt
from pagedjax.cli.errors import reports_errors
from pagedjax.cli.generate import read_prompts


@reports_errors
def calibrate(
    model: opt.Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="`-` is all of standard input as one text."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(help="One text per line, empty lines left out; - is standard input."),
    ] = None,
    dtype: opt.Dtype = "auto",
) -> None:
    """Keep the ranges of keys and values over typical texts in a native checkpoint.

    Engines with a compressed KV cache (`kv_cache_dtype` fp8 or int8) take their scales from
    there. Without a calibration they measure a fixed text of a page at every start.

    Example: `pagedjax calibrate ./llama-1b --file texts.txt`
    """
    chosen = read_prompts(texts or [], file, kind="text")
    from pagedjax.engine.kv_scales import calibrate as measure
    from pagedjax.frontend import of_one_dtype, weights_dtype
    from pagedjax.loading import load_model, write_kv_calibration
    from pagedjax.tokenizer import Tokenizer

    loaded = of_one_dtype(load_model(model, dtype=weights_dtype(dtype)))
    if loaded.tokenizer_dir is None:
        raise ValueError(f"{model!r} has no tokenizer to read the texts with")
    tokenizer = Tokenizer(loaded.tokenizer_dir)
    sequences = [tokenizer.encode(text) for text in chosen]
    arch = loaded.arch
    measured = measure(arch, loaded.params, sequences, max_len=arch.max_positions)
    write_kv_calibration(Path(model), measured)
    keys, values = measured.maxima[:, 0].max(), measured.maxima[:, 1].max()
    typer.echo(
        f"{model}: {sum(map(len, sequences)):,} tokens, largest key {keys:.4g} from the mean, "
        f"largest value {values:.4g}"
    )
