"""The example of the kernels' README runs as printed."""

import re
from pathlib import Path

import numpy as np

import pallas_kernels


def test_the_example_of_the_readme_runs():
    text = (Path(pallas_kernels.__file__).parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    np.testing.assert_array_equal(names["out"], 1.0)  # one key each: its value
