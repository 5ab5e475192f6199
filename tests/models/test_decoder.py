"""The decoder as a plain differentiable module, and its parameters as a dictionary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.models import (
    ArchConfig,
    Decoder,
    decoder_from_params,
    param_axes,
    param_shapes,
    params_of,
)
from tests.support.tiny_engines import random_prompts, tiny_arch, tiny_model


def test_parameters_go_out_and_come_back_untouched():
    arch = tiny_arch(qk_norm=True, qkv_bias=True, out_bias=True)
    model = Decoder(arch, rngs=nnx.Rngs(params=0))
    params = params_of(model)
    assert {name: value.shape for name, value in params.items()} == param_shapes(arch)
    again = params_of(decoder_from_params(arch, params))
    assert all((again[name] == params[name]).all() for name in params)


def test_every_dimension_of_every_parameter_is_named_or_whole():
    arch = tiny_arch(qk_norm=True, qkv_bias=True, out_bias=True)
    shapes, axes = param_shapes(arch), param_axes(arch)
    assert shapes.keys() == axes.keys()
    for name, shape in shapes.items():
        assert len(axes[name]) == len(shape), name
    assert axes["layers.0.attention.qkv"] == ("kv_heads", None, "head_dim", "embed")


def test_a_tied_model_has_no_second_table():
    names = param_shapes(tiny_arch(tied=True))
    assert "unembed.table" not in names
    assert "unembed.table" in param_shapes(tiny_arch())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("norm.scale"), r"absent=\['norm.scale'\]"),
        (lambda p: p.update(extra=jnp.zeros(1)), r"surplus=\['extra'\]"),
        (lambda p: p.update({"norm.scale": jnp.zeros(3)}), r"norm.scale: got shape \(3,\)"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(change, message):
    model = tiny_model()
    params = dict(model.params)
    change(params)
    with pytest.raises(ValueError, match=message):
        decoder_from_params(model.arch, params)


def test_logits_of_a_token_depend_on_nothing_after_it():
    model = tiny_model()
    decoder = decoder_from_params(model.arch, model.params)
    (tokens,) = np.array(random_prompts([20]), np.int32)
    changed = tokens.copy()
    changed[12:] = 3
    logits = jax.jit(lambda t: decoder(t[None])[0])
    before, after = (np.asarray(logits(jnp.asarray(t))) for t in (tokens, changed))
    assert np.abs(before[:12] - after[:12]).max() < 1e-4
    assert np.abs(before[12:] - after[12:]).max() > 1e-2


def test_a_window_hides_what_lies_before_it():
    """KE14: a window of 4 covers the current token and the three before it."""
    model = tiny_model(windows=(4,), layers=1)
    decoder = decoder_from_params(model.arch, model.params)
    (tokens,) = np.array(random_prompts([20]), np.int32)
    outside, inside = tokens.copy(), tokens.copy()
    outside[15], inside[16] = (tokens[15] + 1) % 128, (tokens[16] + 1) % 128
    logits = jax.jit(lambda t: decoder(t[None])[0, -1])
    last = [np.asarray(logits(jnp.asarray(t))) for t in (tokens, outside, inside)]
    assert np.abs(last[0] - last[1]).max() == 0
    assert np.abs(last[0] - last[2]).max() > 1e-3


def test_gradients_reach_every_parameter():
    arch = tiny_arch(qk_norm=True, qkv_bias=True, out_bias=True)
    params = params_of(Decoder(arch, rngs=nnx.Rngs(params=0)))
    tokens = jnp.asarray(np.array(random_prompts([12, 12])), jnp.int32)

    @jax.jit
    def loss(params):
        logprobs = jax.nn.log_softmax(decoder_from_params(arch, params)(tokens))
        return -jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1).mean()

    grads = jax.jit(jax.grad(loss))(params)
    assert {name for name, g in grads.items() if not (jnp.abs(g).max() > 0)} == set()
    step = {name: params[name] - 0.5 * grads[name] for name in params}
    assert loss(step) < loss(params)


def test_an_architecture_survives_json():
    import json

    from pagedjax.models import Llama3Scaling, RopeConfig

    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    for rope in (RopeConfig(theta=5e5, scaling=scaling), RopeConfig(theta=1e4)):
        arch = tiny_arch(rope=rope, windows=(None, 9))
        assert ArchConfig.from_json(json.loads(json.dumps(arch.to_json()))) == arch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q_heads=3), "not a multiple"),
        (dict(head_dim=7), "even head_dim"),
        (dict(layers=3), "2 windows for 3 layers"),
        (dict(windows=(0, None)), "at least 1 position"),
        (dict(vocab=0), "vocab must be at least 1, got 0"),
    ],
)
def test_impossible_architectures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_arch(**changes)


def test_a_damaged_description_is_refused():
    data = tiny_arch().to_json()
    with pytest.raises(ValueError, match="not an architecture description"):
        ArchConfig.from_json({**data, "moe": 1})
    del data["rope"]
    with pytest.raises(ValueError, match="not an architecture description"):
        ArchConfig.from_json(data)
