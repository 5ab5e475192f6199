"""The sampler against dense numpy: filters, ties, seeds, log-probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine.sampler import _kept, sample
from pagedjax.engine.step_inputs import MAX_BANNED_IDS, SamplingArrays

VOCAB = 128
NO_ID = np.iinfo(np.int32).max


def arrays(rows, **changes):
    """Greedy rows without any restriction, but for `changes`."""
    settings = dict(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, sample_index=0, position=0,
        target=-1,
    )  # fmt: skip
    settings.update(changes)
    floats = ("temperature", "top_p", "min_p")
    banned = settings.pop("banned_ids", np.full((rows, MAX_BANNED_IDS), NO_ID, np.int32))
    fields = {
        name: jnp.broadcast_to(jnp.asarray(value, np.float32 if name in floats else np.int32), rows)
        for name, value in settings.items()
    }
    return SamplingArrays(**fields, banned_ids=jnp.asarray(banned))


compiled_sample = jax.jit(functools.partial(sample, full=True), static_argnames="num_top")
compiled_kept = jax.jit(_kept)


def draw(logits, how, num_top=5):
    return compiled_sample(jnp.asarray(logits, jnp.float32), how, num_top=num_top)


def dense_kept(row, top_k, top_p, min_p):
    """The same rule by sorting: the set of ids that may be drawn."""
    order = np.argsort(-row, kind="stable")[: top_k or len(row)]
    probs = np.exp(row[order] - row[order].max())
    probs /= probs.sum()
    mass_before = np.cumsum(probs) - probs
    kept = (mass_before < top_p) & (probs >= min_p * probs.max())
    return set(order[kept].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 5, 127, 128, 129])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_keep_what_sorting_would_keep(top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(size=(4, VOCAB)).astype(np.float32) * 2
    logits[1, 10:14] = logits[1].max()  # ties at the top
    logits[2, :64] = 0.5  # ties across any boundary
    ints, floats = jnp.full(4, top_k, jnp.int32), jnp.full(4, top_p, jnp.float32)
    kept = compiled_kept(jnp.asarray(logits), ints, floats, jnp.full(4, min_p, jnp.float32))
    for row in range(4):
        got = set(np.flatnonzero(np.asarray(kept)[row]).tolist())
        wanted = dense_kept(logits[row].astype(np.float64), top_k, top_p, min_p)
        # Float32 rounding may move the nucleus' edge by one token, never more.
        assert len(got ^ wanted) <= (1 if 1e-9 < top_p < 1 else 0), (row, got ^ wanted)


def test_draws_follow_the_softmax():
    """4000 seeds of one row against the exact distribution (chi-square, 15 degrees)."""
    logits = np.random.default_rng(0).normal(size=16).astype(np.float32)
    rows = 4000
    how = arrays(rows, temperature=0.7, seed=np.arange(rows))
    drawn = np.asarray(draw(np.tile(logits, (rows, 1)), how).token_ids)
    probs = np.exp(logits / 0.7)
    expected = rows * probs / probs.sum()
    counts = np.bincount(drawn, minlength=16)
    assert ((counts - expected) ** 2 / expected).sum() < 40  # p < 0.001 above 37.7


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-7, 1e-30, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    """SA01: dividing by it would overflow, and a draw from NaN quietly returns id 0."""
    logits = np.stack([[1.0, 3.0, 2.0]] * 8)
    out = draw(logits, arrays(8, temperature=np.float32(temperature), seed=np.arange(8)), 3)
    assert np.asarray(out.token_ids).tolist() == [1] * 8
    assert np.isfinite(np.asarray(out.logprob)).all()


@pytest.mark.parametrize(
    "mode",
    [dict(temperature=0.0), dict(temperature=1.0, top_k=1), dict(temperature=1.0, top_p=1e-9)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_ties_go_to_the_lowest_id_in_every_mode(mode, dtype, rows):
    """SA35."""
    logits = jnp.tile(jnp.asarray([1, 3, 3, 2], dtype).astype(jnp.float32), (rows, 1))
    out = draw(logits, arrays(rows, seed=np.arange(rows), **mode), 2)
    assert np.asarray(out.token_ids).tolist() == [1] * rows


@pytest.mark.parametrize("top_k", [128, 129, 9_999_999, 0])
def test_a_top_k_of_the_vocabulary_or_more_is_off(top_k):
    """SA07, SA09."""
    logits = np.random.default_rng(1).normal(size=(64, VOCAB))
    how = dict(temperature=1.0, seed=np.arange(64))
    with_k = draw(logits, arrays(64, top_k=top_k, **how)).token_ids
    assert (np.asarray(with_k) == np.asarray(draw(logits, arrays(64, **how)).token_ids)).all()


def test_a_draw_depends_on_seed_sample_and_position_alone():
    """SA14: not on the row, nor on what the neighbours ask for."""
    logits = np.zeros((6, 1000))
    how = arrays(
        6,
        temperature=[1.0, 1.0, 0.3, 1.0, 1.0, 0.0],
        top_k=[0, 0, 4, 0, 0, 0],
        seed=[42, 7, 42, 42, 42, 42],
        sample_index=[0, 0, 0, 1, 0, 0],
        position=[9, 9, 9, 9, 10, 9],
    )
    batch = np.asarray(draw(logits, how).token_ids)
    alone = np.asarray(draw(logits[:1], arrays(1, temperature=1.0, seed=42, position=9)).token_ids)
    assert batch[0] == alone[0]
    assert len({int(batch[0]), int(batch[1]), int(batch[3]), int(batch[4])}) == 4


def test_a_large_seed_is_a_seed_of_its_own():
    logits = np.zeros((2, 1000))
    how = arrays(2, temperature=1.0, seed=np.array([2**32 - 1, 2**31], np.uint32).view(np.int32))
    out = np.asarray(draw(logits, how).token_ids)
    assert out[0] != out[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature):
    logits = np.zeros((32, 8))
    logits[:, 7] = logits[:, 2] = 50.0
    banned = np.full((32, MAX_BANNED_IDS), NO_ID, np.int32)
    banned[:, :2] = [7, 2]
    how = arrays(32, temperature=temperature, seed=np.arange(32), banned_ids=banned)
    drawn = np.asarray(draw(logits, how).token_ids)
    assert not np.isin(drawn, [2, 7]).any()


def test_logprobs_are_of_the_raw_distribution():
    """Temperature, filters and bans do not show in them; they match a float64 log-softmax."""
    logits = np.random.default_rng(5).normal(size=(4, VOCAB)) * 3
    banned = np.full((4, MAX_BANNED_IDS), NO_ID, np.int32)
    banned[:, 0] = logits.argmax(axis=1)
    how = arrays(
        4, temperature=0.2, top_k=3, seed=np.arange(4), target=[-1, 5, 6, -1], banned_ids=banned
    )
    out = draw(logits, how)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.where([True, False, False, True], np.asarray(out.token_ids), [0, 5, 6, 0])
    assert np.abs(np.asarray(out.logprob) - exact[np.arange(4), target]).max() < 1e-5
    top = np.argsort(-exact, axis=1)[:, :5]
    assert (np.asarray(out.top_ids) == top).all()
    found = np.take_along_axis(exact, top, axis=1)
    assert np.abs(np.asarray(out.top_logprobs) - found).max() < 1e-5


def test_a_draw_without_filters_and_reports_draws_the_same():
    logits = np.random.default_rng(2).normal(size=(9, VOCAB))
    how = arrays(9, temperature=[0, 1, 0.5] * 3, seed=np.arange(9), position=7)
    short = jax.jit(lambda x, h: sample(x, h, full=False, num_top=5))
    fast = short(jnp.asarray(logits, jnp.float32), how)
    assert (np.asarray(fast.token_ids) == np.asarray(draw(logits, how).token_ids)).all()
    assert fast.top_ids is None
