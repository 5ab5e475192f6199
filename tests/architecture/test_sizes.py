"""The tail is what separates a readable project from others: gate the longest, not the average."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pagedjax", "pallas_kernels", "scheduler", "convert")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150  # bodies that are traced into one GPU kernel, in named phases


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    limit = MAX_KERNEL_LINES if path.parts[-2] == "pallas_kernels" else MAX_FUNCTION_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno + 1 <= limit, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
