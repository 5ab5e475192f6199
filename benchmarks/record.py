"""One measurement is one JSON line: what was measured, in which units, on what, by which code."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

Figure = int | float | str | bool | None | list[dict[str, Any]]


def environment() -> dict[str, str]:
    """Device, versions of what has been imported, commit and command of this process."""
    world = {"device": _cpu_name(), "python": platform.python_version()}
    jax = sys.modules.get("jax")
    if jax is not None:
        world["device"] = jax.devices()[0].device_kind
        world["cpu"] = _cpu_name()
    for name in ("numpy", "jax", "torch", "transformers"):
        module = sys.modules.get(name)
        if module is not None:
            world[name] = module.__version__
    world["commit"] = _commit()
    world["command"] = shlex.join(["python", *_command()])
    return world


def record(bench: str, case: str, /, out: Path | None = None, **figures: Figure) -> str:
    """Print one measurement as a JSON line.

    Args:
        bench: the benchmark.
        case: which of its cases.
        out: a file to append the line to as well.
        figures: what was measured; the names end in their unit (`median_us`, `kv_bytes`).

    Returns:
        The line.
    """
    line = json.dumps({"bench": bench, "case": case, **figures, **environment()})
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
    return line


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Short hash of the checkout, with a `+` when tracked files differ; `unknown` without one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if dirty else "")


def _command() -> list[str]:
    """Arguments of the interpreter; a module run with -m by its name, a path by its last part."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    start = ["-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]
    return [*start, *(Path(arg).name if "/" in arg else arg for arg in sys.argv[1:])]
