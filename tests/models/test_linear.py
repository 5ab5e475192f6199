"""The one matrix product of the model, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.layers import linear
from pagedjax.layers.linear import (
    MANY_TOKENS,
    num_pieces,
    product_dtype,
    project,
    project_in_pieces,
)
from pagedjax.models import Decoder, decoder_from_params, params_of
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import (
    random_prompts,
    serve,
    tiny_arch,
    tiny_engine,
    tiny_model,
)


@pytest.mark.parametrize("tokens", [3, MANY_TOKENS])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("out_dtype", [None, jnp.float32])
def test_a_product_is_rounded_once(tokens, dtype, out_dtype):
    """Of 4096 terms; rounded on the way, their sum would be off by several units."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, 2, 2048)), dtype)
    weight = jnp.asarray(rng.normal(size=(5, 2, 2048)), dtype)
    out = jax.jit(lambda a, b: project(a, b, contract=2, out_dtype=out_dtype))(x, weight)
    assert out.dtype == (out_dtype or product_dtype(tokens, dtype)) and out.shape == (tokens, 5)
    wide_x, wide_weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    exact = np.einsum("tij,oij->to", wide_x, wide_weight)
    half_unit = 2**-8 if out.dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(out).astype(np.float64) - exact)
    assert (error <= np.abs(exact) * half_unit + 2e-3).all()


@pytest.fixture
def divided(monkeypatch):
    """Products are divided as on a GPU, though here."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.parametrize(
    ("tokens", "outputs", "inner", "pieces"),
    [
        (48, 6144, 4096, 2),  # 96 tiles
        (48, 4096, 14336, 2),  # 64 tiles
        (48, 28672, 4096, 1),  # 448 tiles
        (128, 4096, 4096, 2),  # a tile has all rows
        (17, 1024, 2048, 8),  # 256 of each dot product, which would be no longer worth a start
        (17, 1024, 1000, 1),  # not a multiple of cache lines
        (8, 1024, 2048, 8),
        (1, 4096, 14336, 8),  # a single vector's product wants more
        (MANY_TOKENS, 1024, 4096, 1),
    ],
)
def test_a_product_is_divided_until_it_fills_the_device(divided, tokens, outputs, inner, pieces):
    assert num_pieces(tokens, outputs, inner) == pieces


def test_a_product_is_whole_on_a_cpu():
    assert num_pieces(48, 4096, 14336) == 1


@pytest.mark.parametrize("tokens", [1, 64])
def test_pieces_add_up_to_the_product(divided, tokens):
    """Each of them is a part of the sum, in order, and exact to float32."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, 4, 512)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(3, 2, 4, 512)), jnp.bfloat16)
    out = jax.jit(lambda a, b: project_in_pieces(a, b, contract=2))(x, weight)
    assert out.dtype == jnp.float32 and out.shape == (8, tokens, 3, 2)
    wide_x, wide_weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    halves = np.einsum(
        "tps,abps->ptab", wide_x.reshape(tokens, 8, 256), wide_weight.reshape(3, 2, 8, 256)
    )
    np.testing.assert_allclose(out, halves, rtol=1e-5, atol=1e-4)
    whole = project(x, weight, contract=2)
    np.testing.assert_allclose(out.sum(axis=0), whole, rtol=1e-5, atol=3e-4)


def test_a_bias_is_shared_by_the_pieces(divided):
    x, weight = jnp.ones((32, 2048), jnp.bfloat16), jnp.ones((6, 2048), jnp.bfloat16)
    bias = jnp.arange(6, dtype=jnp.bfloat16) / 3
    out = project_in_pieces(x, weight, bias=bias)
    assert out.shape == (8, 32, 6)
    wanted = 2048 + np.asarray(bias).astype(np.float32)
    np.testing.assert_array_equal(out.sum(axis=0), np.broadcast_to(wanted, (32, 6)))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"qkv_bias": True, "out_bias": True}])
def test_a_forward_in_pieces_is_the_forward(monkeypatch, options):
    """Of the logits, and of the gradients of all parameters."""
    arch = tiny_arch(embed=64, mlp=96, **options)
    params = params_of(Decoder(arch, rngs=nnx.Rngs(params=0)))
    tokens = jnp.asarray(np.array(random_prompts([12])), jnp.int32)

    def run():
        def loss(params):
            logits = decoder_from_params(arch, params)(tokens)
            return jnp.sum(jax.nn.log_softmax(logits) ** 2), logits

        jax.clear_caches()  # layers are traced once
        return jax.jit(jax.grad(loss, has_aux=True))(params)

    seen = []
    whole = run()

    def in_two(tokens, outputs, inner):
        seen.append((tokens, outputs, inner))
        return 2

    monkeypatch.setattr(linear, "num_pieces", in_two)
    halves = run()
    jax.clear_caches()
    assert (12, 64, 96) in seen
    for got, wanted in zip(jax.tree.leaves(halves), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_an_engine_computes_the_same_in_pieces(monkeypatch, cache):
    """Prefill and decode over the paged cache, of several sequences at once."""
    model = tiny_model(qk_norm=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens():
        jax.clear_caches()  # layers are traced once
        engine = tiny_engine(model, compilation_cache=False, kv_cache_dtype=cache)
        return [
            out.outputs[0].token_ids for out in serve(engine, random_prompts([5, 17, 30]), params)
        ]

    whole = tokens()
    seen = []

    def in_four(*sizes):
        seen.append(sizes)
        return 4

    monkeypatch.setattr(linear, "num_pieces", in_four)
    quarters = tokens()
    jax.clear_caches()
    assert seen and quarters == whole and all(len(ids) == 12 for ids in whole)
