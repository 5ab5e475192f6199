"""Errors as one clear line and an exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130

_P = ParamSpec("_P")


def reports_errors(command: Callable[_P, None]) -> Callable[_P, None]:
    """`command` with expected errors turned into a line on standard error and an exit code.

    Anything else, such as a failed assertion, is a defect of this program and keeps its traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError, too
            raise
        except BrokenPipeError:
            # The reader (`| head`) has left. Python would complain again when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except (ValueError, NotImplementedError, FileNotFoundError, NotADirectoryError) as error:
            complain(str(error))
            raise typer.Exit(BAD_INPUT) from None
        except (OSError, RuntimeError, MemoryError, ImportError) as error:
            complain(str(error) or type(error).__name__)
            raise typer.Exit(FAILED) from None

    return wrapped


def complain(message: str) -> None:
    """Print `message` to standard error, as one line."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
