"""Writes the README's list of files from docstrings: `python -m tests.support.readme_files`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "pagedjax",
    "pagedjax/cli",
    "pagedjax/engine",
    "pagedjax/models",
    "pagedjax/layers",
    "scheduler",
    "pallas_kernels",
    "convert",
    "convert/families",
    "benchmarks",
)
HEADING, ANY_HEADING = "## What is in each file\n\n", "\n## "


def source_files(folder: str) -> list[Path]:
    """The modules of one folder, except its `__init__.py`."""
    return sorted(p for p in (ROOT / folder).glob("*.py") if p.name != "__init__.py")


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def section() -> str:
    """The list, folder by folder."""
    paragraphs = []
    for folder in FOLDERS:
        init = ROOT / folder / "__init__.py"
        purpose = first_line(init) if init.exists() else "What is measured, and how."
        lines = [f"- `{path.name}` {first_line(path)}" for path in source_files(folder)]
        paragraphs.append(f"**`{folder}/`** {purpose}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(paragraphs)


def main() -> None:
    """Replace the list in the README."""
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(HEADING)
    _, after = rest.split(ANY_HEADING, 1)
    readme.write_text(before + HEADING + section() + ANY_HEADING + after, encoding="utf-8")


if __name__ == "__main__":
    main()
