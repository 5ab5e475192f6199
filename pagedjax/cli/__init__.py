"""The command line: `pagedjax convert | generate | chat | info | calibrate | top | demo`.

Exit codes: 0 all is well, 1 something failed (for `generate`, also any single request), 2 bad
input, 130 interrupted. Results go to standard output, progress and errors to standard error.
"""

import typer

from pagedjax.cli.calibrate import calibrate
from pagedjax.cli.chat import chat
from pagedjax.cli.convert import convert
from pagedjax.cli.demo import demo
from pagedjax.cli.generate import generate
from pagedjax.cli.info import info
from pagedjax.cli.top import top

app = typer.Typer(
    help="Paged-attention LLM inference in JAX. Each command's --help has an example.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command in (convert, generate, chat, info, calibrate, top, demo):
    app.command()(command)
