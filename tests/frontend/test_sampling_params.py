"""What a caller may ask for, and what is refused with an error that names the field."""

import dataclasses
import doctest
import math

import numpy as np
import pytest

from pagedjax import sampling_params
from pagedjax.models.generation import GenerationDefaults
from pagedjax.sampling_params import BeamSearchParams, SamplingParams

NAN, INF = math.nan, math.inf

# SA03, SA05, SA07, SC19, SV06, SV07, SV08: values that reached the sampler of some engine.
REFUSED = {
    "n": [0, -1, 257, 10**9, 1.5, "3", True, None],
    "temperature": [-1, -1e-9, NAN, INF, -INF, 1e400, True, "0.5", None, 1e9, 10**400],
    "top_k": [-2, 1.0, NAN, True, "5", None],
    "top_p": [0, 0.0, -1, 1.5, NAN, INF, True, "1", None],
    "min_p": [-0.1, 2, NAN, -INF, False, None],
    "repetition_penalty": [0, -1, 1e-9, 101, NAN, INF, True, "1", None],
    "presence_penalty": [-2.1, 2.1, NAN, -INF, False, None],
    "frequency_penalty": [-3, 3, NAN, INF, "0", None],
    "seed": [-1, 2**32, 1.5, True, "7"],
    "max_tokens": [0, -1, 2**63, 2.0, NAN, True, "16"],
    "min_tokens": [-1, 17, 2**63, 1.5, True, None],
    "stop": ["", ["a", ""], [1], 5, None, b"x", ["x"] * 257, {"a"}],
    "stop_token_ids": [[-1], [1.5], [True], "12", 5, None, ["7"], range(257), [2**31]],
    "include_stop_str_in_output": [1, 0, "yes", None],
    "ignore_eos": [1, None],
    "skip_special_tokens": [0, "false", None],
    "cache_salt": [1, b"x"],
    "logprobs": [-1, 21, 10**6, 1.0, True, "5"],
    "prompt_logprobs": [-1, 21, True, NAN],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_impossible_values_are_refused_by_an_error_that_names_the_field(field, value):
    with pytest.raises(ValueError, match=rf"\b{field}\b.*got"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", [1, 0, 1.0, np.True_, "Never", None])
def test_a_search_stops_early_by_true_false_or_never_and_nothing_equal_to_them(value):
    """1 was taken, and then searched as False does."""
    with pytest.raises(ValueError, match="early_stopping must be"):
        BeamSearchParams(beam_width=2, early_stopping=value)


def test_every_field_has_refused_values():
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [1, 256]),
        ("temperature", [0, 0.0, 5e-324, 1e-40, 2, 1e6]),
        ("top_k", [-1, 0, 1, 127, 128, 129, 9999999]),
        ("top_p", [1e-9, 0.5, 1, 1.0]),
        ("min_p", [0, 0.5, 1]),
        ("repetition_penalty", [0.01, 1, 100]),
        ("presence_penalty", [-2, 0, 2]),
        ("frequency_penalty", [-2, 0, 2]),
        ("seed", [None, 0, 2**32 - 1]),
        ("max_tokens", [None, 1, 2**31 - 1]),
        ("min_tokens", [0, 16]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
    ],
)
def test_the_ends_of_every_range_are_accepted(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_numpy_scalars_count_as_numbers_and_are_stored_as_pythons_own():
    params = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), seed=np.uint32(7))
    assert (params.top_k, params.temperature, params.seed) == (5, 0.5, 7)
    assert type(params.top_k) is int
    assert type(params.temperature) is float
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=np.float32("nan"))  # pyright: ignore[reportArgumentType]


def test_stop_rules_are_stored_as_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, np.int32(4)]).stop_token_ids == (3, 4)
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


def test_min_tokens_may_be_anything_without_max_tokens():
    assert SamplingParams(max_tokens=None, min_tokens=5000).min_tokens == 5000


def test_a_checkpoint_that_does_not_sample_is_decoded_greedily():
    defaults = GenerationDefaults(temperature=0.7, top_p=0.9)
    assert SamplingParams.from_generation(defaults) == SamplingParams(temperature=0.0)


def test_a_checkpoint_that_samples_brings_its_own_settings_and_changes_win():
    defaults = GenerationDefaults(do_sample=True, temperature=0.6, top_p=0.9)
    assert SamplingParams.from_generation(defaults) == SamplingParams(temperature=0.6, top_p=0.9)
    changed = SamplingParams.from_generation(defaults, temperature=0.0, max_tokens=3)
    assert changed == SamplingParams(temperature=0.0, top_p=0.9, max_tokens=3)


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_checkpoints_repetition_penalty_holds_for_greedy_decoding_too(do_sample):
    defaults = GenerationDefaults(do_sample=do_sample, repetition_penalty=1.1)
    assert SamplingParams.from_generation(defaults).repetition_penalty == 1.1
    changed = SamplingParams.from_generation(defaults, repetition_penalty=1.0)
    assert not changed.is_penalized


def test_params_cannot_be_changed_behind_the_check():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = -1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(SamplingParams(), top_p=2.0)


def test_the_examples_in_the_docstrings_are_true():
    tested = doctest.testmod(sampling_params)
    assert tested.attempted >= 1
    assert tested.failed == 0
