"""The README says what is true: its example runs, its files and commands exist."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pagedjax.cli import app
from pagedjax.demo import MODEL_NAME
from tests.support.readme_files import FOLDERS, ROOT, source_files

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_example_runs_as_printed(tiny_native, tmp_path):
    """With a tiny model in the demo model's place, so that nothing is fetched."""
    home = tmp_path / "pagedjax" / "demo"
    home.mkdir(parents=True)
    (home / MODEL_NAME).symlink_to(tiny_native, target_is_directory=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", EXAMPLES[0]]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr  # transformers likes to remark that it is missing
    for prompt in ("The capital of France is", "Three primary colours:", "Once upon a time"):
        assert f"{prompt}" in done.stdout
    assert len(re.findall(r"^  \d+ tokens, (?:stop|length)$", done.stdout, re.MULTILINE)) == 3


def test_the_example_is_ten_lines():
    assert len(EXAMPLES[0].splitlines()) == 10


def test_the_asyncio_example_compiles():
    wrapped = "async def main():\n" + "".join(f"    {line}\n" for line in EXAMPLES[1].splitlines())
    compile(wrapped, "README.md", "exec")


def test_every_source_file_has_its_sentence_and_every_named_file_exists():
    folders = re.findall(r"^\*\*`([\w/]+)/`\*\*.*\n\n((?:- .*\n)*)", README, flags=re.MULTILINE)
    named = {
        f"{folder}/{name}"
        for folder, lines in folders
        for name in re.findall(r"^- `(\w+\.py)` \S", lines, flags=re.MULTILINE)
    }
    present = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in source_files(folder)}
    assert named == present, "python -m tests.support.readme_files writes the list anew"


def test_every_command_line_in_the_readme_is_understood():
    commands = re.findall(r"^pagedjax (\w+)(.*?)(?:#.*)?$", README, flags=re.MULTILINE)
    assert {name for name, _ in commands} == {"convert", "info", "generate", "chat"}
    for name, rest in commands:
        shown = CliRunner().invoke(app, [name, "--help"]).stdout
        for option in re.findall(r"--[\w-]+", rest.split("$(")[0]):
            assert option in shown


@pytest.mark.parametrize("target", ["demo", "test"])
@pytest.mark.parametrize("extras", ["", "cuda", "cuda bench"])
def test_make_installs_the_extras_once_and_leaves_a_stamp_of_its_own(target, extras):
    command = ["make", "--dry-run", "--always-make", target, f"EXTRAS={extras}", "PYTHON=true"]
    # Without what a surrounding make hands down: its own variables and flags.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    stamp = "-".join([".installed", *extras.split(), *(["test"] if target == "test" else [])])
    assert re.findall(r"^touch (.*)$", done.stdout, re.MULTILINE) == [f".venv/{stamp}"]
    wanted = ",".join([*extras.split(), *(["test"] if target == "test" else [])])
    assert f'--editable ".{f"[{wanted}]" if wanted else ""}"' in done.stdout


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_the_makefile_has_the_targets(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
