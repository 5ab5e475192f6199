"""What may be imported by what, beyond the layers that import-linter checks."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pagedjax", ("jax", "transformers", "torch", "numpy")),
        ("pagedjax.models", ("jax", "flax")),
        ("pagedjax.sampling_params", ("jax", "transformers")),
        ("scheduler", ("jax", "flax")),
        ("pallas_kernels", ("flax", "transformers", "orbax")),
        ("pagedjax.engine.engine", ("torch",)),
    ],
)
def test_a_module_loads_without_what_it_does_not_need(module, absent):
    """A fresh interpreter, since this one has everything loaded."""
    code = f"import sys, {module}; print(*[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_package_lists_its_public_names_and_nothing_else():
    import pagedjax

    assert dir(pagedjax) == sorted(pagedjax.__all__)
