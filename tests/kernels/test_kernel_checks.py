"""The check that runs on a GPU: its problems cover what they claim, and it fails when it should."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import kernel_checks
from benchmarks.kernel_checks import (
    FACTORS,
    SMALL,
    Problem,
    check_large_pool,
    check_one,
    pairwise,
)

DECLINED = Problem(head_dim=80)  # by the Mosaic decode kernel


def test_every_two_levels_meet_in_a_problem():
    problems = pairwise(list(FACTORS.values()))
    assert problems == pairwise(list(FACTORS.values()))
    for one, other in itertools.combinations(FACTORS.values(), 2):
        for a, b in itertools.product(one, other):
            settings = a | b
            options = {"window": None, "soft_cap": None, "sinks": False}
            if a in FACTORS["options"] or b in FACTORS["options"]:
                settings = options | settings
            assert any(
                all(getattr(p, name) == value for name, value in settings.items()) for p in problems
            )


@pytest.mark.parametrize("name", ["rows", "fp8", "prefill"])
def test_a_right_result_passes(name):
    (figures,) = check_one("xla", SMALL[name])
    assert figures["passed"], figures


@pytest.mark.parametrize("problem", kernel_checks.PAIRS[::3], ids=str)
def test_a_pool_of_two_arrays_passes_and_the_kernel_for_one_declines_it(problem):
    (figures,) = check_one("xla", problem)
    assert figures["passed"], figures
    (figures,) = check_one("mosaic", problem)
    assert "in one array, got a pair" in figures["declined"] and "passed" not in figures


@pytest.mark.parametrize("fault", ["value", "nan", "padding", "lse", "not repeatable"])
def test_a_wrong_result_fails(monkeypatch, fault):
    real, calls = pallas_kernels.paged_decode_attention, []

    def faulty(*args, **options):
        out, lse = real(*args, **options)
        if fault == "value":
            out = out.at[0, 0].multiply(jnp.bfloat16(1.1))
        elif fault == "nan":
            out = out.at[2, 1, 3].set(jnp.nan)
        elif fault == "padding":
            out = out.at[1, 0, 0].set(jnp.bfloat16(1e-3))  # the sequence of length 0
        elif fault == "lse":
            lse = lse + 0.01
        else:
            noise = jax.pure_callback(
                lambda: np.float32(calls.append(None) or len(calls)), jax.ShapeDtypeStruct((), "f4")
            )
            out = out.at[0, 0, 0].add((noise * 1e-2).astype(out.dtype))
        return out, lse

    monkeypatch.setattr(pallas_kernels, "paged_decode_attention", faulty)
    assert check_one("xla", SMALL["decode"])[0]["passed"] is False


def test_a_backend_that_declines_neither_passes_nor_fails():
    (figures,) = check_one("mosaic", DECLINED)
    assert "passed" not in figures and figures["declined"]


def test_the_end_of_a_pool_is_written_and_read(monkeypatch):
    for kv_dtype in ("bfloat16", "float8_e4m3fn"):
        for figures in check_large_pool("xla", kv_dtype, 100_000):
            assert figures["passed"], figures
    monkeypatch.setattr(pallas_kernels, "write_kv", lambda pool, *args, **options: pool)
    assert not any(f["passed"] for f in check_large_pool("xla", "bfloat16", 100_000))


def test_problems_have_names_of_their_own():
    names = [problem.name for problem in kernel_checks.problems()]
    assert len(set(names)) == len(names)


def test_a_job_that_ends_its_process_fails_alone(capsys):
    jobs = [
        ("ends", os._exit, (1,)),
        ("declined", check_one, ("mosaic", DECLINED)),
    ]
    outcomes = kernel_checks.run_jobs(iter(jobs))
    assert [figures.get("passed") for figures in outcomes] == [False, None]
    assert capsys.readouterr().out.count('"bench": "kernel_check"') == 2


def test_the_control_of_the_poison_finds_nan_where_a_kernel_writes_nothing():
    (figures,) = kernel_checks.check_poison(interpret=True)  # the interpreter's memory is NaN, too
    assert figures == {"case": "poison", "implementation": "triton", "passed": True}
