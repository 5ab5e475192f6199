"""What recomputing a preempted sequence is taken to cost, by the count of whole requests."""

import dataclasses
import math

import pytest

from benchmarks.flops import request_flops
from benchmarks.shapes import SHAPES
from benchmarks.workloads import RequestShape
from pagedjax.engine.lower_tiers import attention_tokens


def test_the_length_at_which_attention_is_half_of_a_prompts_arithmetic():
    """By the count of whole requests: of the double length, attention takes four times as much."""
    arch = SHAPES["llama3.1-8b"]
    length = round(attention_tokens(arch))
    head = 2 * arch.vocab * arch.embed
    once, twice = (
        request_flops(arch, [RequestShape(n, 1, 0.0)]) - head for n in (length, 2 * length)
    )
    # once = products + attention, twice = 2 products + 4 attention
    assert (twice - 2 * once) / 2 == pytest.approx(once / 2, rel=1e-3)
    windowed = dataclasses.replace(arch, windows=(4096,) * arch.layers)
    assert attention_tokens(windowed) == math.inf
