"""Kernels whose lowered form the programs of a process share."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import lowered_once as shared
from pallas_kernels import paged_decode_mosaic
from pallas_kernels.interpret import lower_for_hopper, mosaic_interpreter

try:
    mosaic_interpreter()
except NotImplementedError as error:
    pytest.skip(str(error), allow_module_level=True)

STRUCT = jax.ShapeDtypeStruct
HEADS = 8, 2, 64  # query heads, key/value heads, head size
KERNEL = "custom_call @mosaic_gpu_v2"


@pytest.fixture
def builds(monkeypatch):
    """Arguments of every decode kernel that is built."""
    made, build = [], paged_decode_mosaic._build

    def noting(*args):
        made.append(args)
        return build(*args)

    monkeypatch.setattr(paged_decode_mosaic, "_build", noting)
    return made


def operands(tokens, *, seqs=4, dtype=jnp.bfloat16):
    q_heads, kv_heads, head_dim = HEADS
    return (
        STRUCT((tokens, q_heads, head_dim), dtype),
        STRUCT((32, 2, kv_heads, 16, head_dim), dtype),
        STRUCT((seqs, 8), jnp.int32),
        STRUCT((seqs,), jnp.int32),
    )


def lower_prefill(tokens, *, seqs=4, **options):
    attend = functools.partial(
        pallas_kernels.paged_prefill_attention, implementation="mosaic", **options
    )
    query_start = STRUCT((seqs + 1,), jnp.int32)
    return lower_for_hopper(attend, *operands(tokens, seqs=seqs), query_start)


def test_steps_of_different_sizes_share_the_decode_kernel(builds):
    texts = [lower_prefill(tokens) for tokens in (128, 256, 128)]
    assert len(builds) == 1
    # Each program has it whole, beside its own kernel of prefill.
    assert [text.count(KERNEL) for text in texts] == [2, 2, 2]


@pytest.mark.parametrize("change", [dict(seqs=8), dict(window=9), dict(scale=0.3)])
def test_what_makes_another_kernel_is_lowered_by_itself(builds, change):
    lower_prefill(128)
    lower_prefill(128, **change)
    assert len(builds) == 2
    assert builds[0] != builds[1]


def test_a_kernel_is_told_apart_by_the_shapes_of_its_operands(builds):
    """A wider block table is no argument of the kernel's, but the kernel reads it."""
    decode = functools.partial(pallas_kernels.paged_decode_attention, implementation="mosaic")
    for blocks in (8, 16):
        q, pool, _, lens = operands(4)
        text = lower_for_hopper(decode, q, pool, STRUCT((4, blocks), jnp.int32), lens)
        assert f"tensor<4x{blocks}xi32>" in text
        assert text.count(KERNEL) == 1
    assert len(builds) == 2


def test_a_call_inlines_what_the_kernel_lowers_to_alone():
    """The bytes of the kernel in a program are those of its own lowering."""
    decode = functools.partial(pallas_kernels.paged_decode_attention, implementation="mosaic")

    def kernels(text):
        return [line.split("@mosaic_gpu_v2")[1] for line in text.splitlines() if KERNEL in line]

    twice = lower_for_hopper(lambda *args: (decode(*args), decode(*args)), *operands(4))
    once = lower_for_hopper(decode, *operands(4))
    assert len(kernels(once)) == 1
    assert {_payload(k) for k in kernels(twice)} == {_payload(k) for k in kernels(once)}


def _payload(call):
    start = call.index("module = ")
    return call[start : call.index('"', start + len('module = "'))]


def test_a_batch_of_calls_runs_one_after_the_other():
    """As a kernel does that is called as it is."""
    decode = functools.partial(pallas_kernels.paged_decode_attention, implementation="mosaic")
    batched = jax.vmap(decode, in_axes=(0, None, None, None))
    q, *rest = operands(4)
    text = lower_for_hopper(batched, STRUCT((3, *q.shape), q.dtype), *rest)
    assert text.count(KERNEL) == 1
    assert "stablehlo.while" in text


def test_kernels_are_kept_by_what_they_are_made_from():
    before = shared._lowered.cache_info().misses
    for _ in range(2):
        lower_for_hopper(lambda x: shared.lowered_once(_scaled, 3)(x), STRUCT((4,), jnp.float32))
    assert shared._lowered.cache_info().misses == before + 1


def _scaled(times):
    return lambda x: x * times
