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

# A path of the user's that can not be read or written as it is, or names something else.
_BAD_PATHS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)

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
        except (ValueError, NotImplementedError, *_BAD_PATHS) as error:
            complain(_text_of(error))
            raise typer.Exit(BAD_INPUT) from None
        except (OSError, RuntimeError, MemoryError, ImportError) as error:
            complain(_text_of(error))
            raise typer.Exit(FAILED) from None

    return wrapped


def _text_of(error: Exception) -> str:
    """What an error says; the system's own without their numbers."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fspath(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def complain(message: str) -> None:
    """Print `message` to standard error, as one line."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
