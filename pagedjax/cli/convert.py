"""`pagedjax convert`: a checkpoint from elsewhere becomes a native one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pagedjax.cli.errors import reports_errors
from pagedjax.cli.terminal import STDERR

if TYPE_CHECKING:
    from convert import NativeTensor


@reports_errors
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Hugging Face directory, or a .gguf file.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Directory to create.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Store as bfloat16, float16 or float32; default: as it is."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a native checkpoint at DST.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare logits with transformers (needs PyTorch)."),
    ] = False,
) -> None:
    """Convert a checkpoint to the native format, tensor by tensor.

    Example: `pagedjax convert ./Llama-3.2-1B ./llama-1b --dtype bfloat16`
    """
    import convert as conversion

    written = 0

    with STDERR.status("reading") as status:

        def show(tensor: NativeTensor) -> None:
            nonlocal written
            written += 1
            status.update(f"{written} tensors written, last {tensor.name}")

        report = conversion.convert(
            source, destination, dtype=dtype, overwrite=overwrite, check=check, progress=show
        )
    for note in report.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(
        f"{report.destination}: {report.num_params:,} parameters in {report.num_tensors} tensors, "
        f"{report.nbytes / 1e6:,.1f} MB"
    )
    if report.largest_difference is not None:
        typer.echo(f"largest difference of logits: {report.largest_difference:.2e}")
