"""Draw the next token of every row where the argmax is not what is wanted.

The order is the field's usual one: penalties, bans, temperature, top-k, top-p over what top-k
left, min-p. Reported log-probabilities are of the raw distribution, before any of them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pagedjax.engine.penalties import penalize
from pagedjax.engine.step_inputs import SamplingArrays

# Below this the softmax is a step function in float32, and dividing by it may overflow: greedy.
MIN_TEMPERATURE = 1e-5


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutputs:
    """What a step hands back to the host, per sampled row.

    Attributes:
        token_ids: the drawn tokens.
        logprob: natural log-probability of the row's target token, raw distribution, float32;
            without meaning where nobody asked. None, as the following, unless drawn with `full`.
        top_ids: ids of the likeliest tokens, best first.
        top_logprobs: their log-probabilities.
    """

    token_ids: Int[Array, " rows"]
    logprob: Float[Array, " rows"] | None = None
    top_ids: Int[Array, "rows top"] | None = None
    top_logprobs: Float[Array, "rows top"] | None = None


def sample(
    logits: Float[Array, "rows vocab"],
    how: SamplingArrays,
    seen: Int[Array, "seqs vocab"] | None = None,
    *,
    full: bool,
    num_top: int,
) -> SampleOutputs:
    """Draw a token per row.

    Args:
        logits: raw, float32.
        how: the rows' parameters.
        seen: what penalties go by (`pagedjax.engine.penalties`); None if there are none.
        full: whether any row has a filter or wants log-probabilities. Without it both are left
            out; what is drawn is the same.
        num_top: log-probabilities of how many likeliest tokens to report, if `full`.
    """
    allowed = logits
    if how.penalties is not None and seen is not None:
        allowed = penalize(allowed, seen, how.penalties)
    token_ids = _draw(_ban(allowed, how.banned_ids), how, filtered=full)
    if not full:
        return SampleOutputs(token_ids=token_ids)
    target = jnp.where(how.target >= 0, how.target, token_ids)
    logprob, top_logprobs, top_ids = _logprobs(logits, target, num_top)
    return SampleOutputs(
        token_ids=token_ids, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs
    )


def _logprobs(
    logits: Float[Array, "rows vocab"], target: Int[Array, " rows"], num_top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probability of each row's target, and the likeliest tokens' with their ids."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0], top_logprobs, top_ids


def _ban(logits: Float[Array, "rows vocab"], ids: Int[Array, "rows banned"]) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _draw(
    logits: Float[Array, "rows vocab"], how: SamplingArrays, *, filtered: bool
) -> Int[Array, " rows"]:
    """Categorical draw by the Gumbel-max trick, after the filters; argmax for greedy rows."""
    is_greedy = how.temperature < MIN_TEMPERATURE
    scaled = logits / jnp.where(is_greedy, 1.0, how.temperature)[:, None]
    noisy = scaled + _noise(how, logits.shape[1])
    if filtered:
        noisy = jnp.where(_kept(scaled, how.top_k, how.top_p, how.min_p), noisy, -jnp.inf)
    chosen = jnp.where(is_greedy, jnp.argmax(logits, axis=-1), jnp.argmax(noisy, axis=-1))
    return chosen.astype(jnp.int32)


def _noise(how: SamplingArrays, vocab: int) -> Float[Array, "rows vocab"]:
    """Gumbel noise that depends on the request's seed, sample index and position alone.

    Not on its neighbours in the batch, its row, chunking or preemption.
    """

    def one(seed: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        # By name: the draws of JAX's other generators depend on the rows beside them under vmap.
        key = jax.random.key(jax.lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(one)(how.seed, how.sample_index, how.position)


def _kept(
    scaled: Float[Array, "rows vocab"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Bool[Array, "rows vocab"]:
    """Which tokens may be drawn. Ties rank by id, as in argmax, so top_k=1 is greedy."""
    keys = _order_keys(scaled)
    vocab = scaled.shape[1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
    kept = _smallest_head(keys, jnp.ones_like(scaled), k)
    probs = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    # At top_p = 1 rounding must not cut the tail off.
    mass = jnp.where(top_p < 1.0, top_p, jnp.inf)
    kept &= _smallest_head(keys, probs, mass)
    return kept & (probs >= min_p[:, None] * probs.max(axis=-1, keepdims=True))


def _order_keys(x: Float[Array, "rows vocab"]) -> Int[Array, "rows vocab"]:
    """int32 keys that order like the floats: the bits, with those of negatives turned around."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _smallest_head(
    keys: Int[Array, "rows vocab"], weight: Float[Array, "rows vocab"], goal: Float[Array, " rows"]
) -> Bool[Array, "rows vocab"]:
    """The shortest head of the descending order whose weight reaches `goal`; all if none does.

    The key at which the goal is reached is found bit by bit, one sum over the row for each of
    its 32 bits, instead of by sorting the vocabulary; ties at that key are taken in id order.
    """

    def reaches(bound: jax.Array) -> jax.Array:
        return jnp.where(keys >= bound[:, None], weight, 0.0).sum(axis=-1) >= goal

    lowest = jnp.full(goal.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    # The sign bit first: is the bound non-negative? Then the other bits, from the top.
    bound = jnp.where(reaches(jnp.zeros_like(lowest)), 0, lowest)

    def refine(step: jax.Array, bound: jax.Array) -> jax.Array:
        higher = bound + (jnp.int32(1) << (30 - step))
        return jnp.where(reaches(higher), higher, bound)

    bound = jax.lax.fori_loop(0, 31, refine, bound)[:, None]
    above, tied = keys > bound, keys == bound
    so_far = jnp.where(above, weight, 0.0).sum(axis=-1, keepdims=True)
    tied_weight = jnp.where(tied, weight, 0.0)
    before = so_far + jnp.cumsum(tied_weight, axis=-1) - tied_weight
    return above | (tied & (before < goal[:, None]))
