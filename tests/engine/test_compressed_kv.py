"""fp8 and int8 KV caches against a forward pass that rounds keys and values the same way."""

import json
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine.kv_pool import blocks_that_fit, keeps_keys, kv_spec, value_dtype
from pagedjax.engine.kv_scales import (
    PIECE_TOKENS,
    KVScales,
    calibrate,
    default_sequences,
    scales_for,
)
from pagedjax.layers.attention import attend_within
from pagedjax.loading import read_kv_calibration, write_kv_calibration
from pagedjax.models import RopeConfig, decoder_from_params
from pagedjax.models.kv_calibration import KVCalibration
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import (
    plain_logits,
    random_prompts,
    serve,
    tiny_arch,
    tiny_engine,
    tiny_model,
)

SCORED = SamplingParams(
    temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0
)
LARGEST = {"fp8": 448.0, "int8": 127.0}
PADDED_LEN = 96
ALL = ["fp8", "int8", "fp8-values", "int8-values"]


def rounded(x, scale, kv_cache_dtype):
    """`x` after storage, by numpy: `[tokens, kv_heads, head_dim]` with a scale per head."""
    bound = LARGEST[kv_cache_dtype]
    scaled = np.clip(x / scale[None, :, None], -bound, bound)
    if kv_cache_dtype == "fp8":
        scaled = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.rint(scaled) * scale[None, :, None] if kv_cache_dtype == "int8" else (
        scaled * scale[None, :, None]
    )  # fmt: skip


@dataclass(frozen=True)
class RoundedSequence:
    """The plain forward's memory, with keys and values rounded; runs without jit."""

    layer: KVScales
    kv_cache_dtype: str

    def attend(self, heads, *, window):
        q, k, v = heads.split()
        k_scale, v_scale = np.asarray(self.layer.scales)
        dtype, _, values_only = self.kv_cache_dtype.partition("-")
        assert (self.layer.key_mean is None) == bool(values_only)
        if not values_only:
            mean = np.asarray(self.layer.key_mean)
            k = rounded(np.asarray(k) - mean, k_scale, dtype) + mean
        v = rounded(np.asarray(v), v_scale, dtype)
        k, v = jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32)
        return attend_within(q, k, v, window=window), self


jax.tree_util.register_pytree_node(
    RoundedSequence, lambda m: ((), m), lambda m, _: m
)  # fmt: skip


def rounded_logprobs(model, tokens, kv_cache_dtype, scales):
    """Log-probability of each token after the first, float32.

    Padded to one length, so that operations are compiled once: no token sees what follows it.
    """
    decoder = decoder_from_params(model.arch, model.params)
    memories = [RoundedSequence(one, kv_cache_dtype) for one in scales]
    ids = jnp.asarray([*tokens, *[0] * (PADDED_LEN - len(tokens))], jnp.int32)
    with jax.disable_jit():
        hidden, _ = decoder.hidden(ids, jnp.arange(PADDED_LEN, dtype=jnp.int32), memories)
        logprobs = jax.nn.log_softmax(decoder.logits(hidden), axis=-1)
    return np.asarray(logprobs)[np.arange(len(tokens) - 1), tokens[1:]]


def calibration(maximum):
    """A calibration of the tiny model that has seen nothing larger than `maximum`."""
    arch = tiny_arch()
    return KVCalibration(
        key_means=np.zeros((arch.layers, arch.kv_heads, arch.head_dim), np.float32),
        maxima=np.full((arch.layers, 2, arch.kv_heads), maximum, np.float32),
    )


def reported(output):
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([entry.logprob for entry in entries])


def default_scales(model, kv_cache_dtype):
    sequences = default_sequences(model.arch.vocab, None)
    found = calibrate(model.arch, model.params, sequences, max_len=model.arch.max_positions)
    with_keys = not keeps_keys(kv_cache_dtype)
    return scales_for(found, value_dtype(kv_cache_dtype), with_keys=with_keys)


@pytest.mark.parametrize("kv_cache_dtype", ALL)
@pytest.mark.parametrize("windows", [(None, None), (12, None)])
def test_log_probabilities_are_those_of_rounded_keys_and_values(kv_cache_dtype, windows):
    model = tiny_model(windows=windows)
    engine = tiny_engine(model, kv_cache_dtype=kv_cache_dtype, max_prefill_chunk=24)
    scales = default_scales(model, kv_cache_dtype)
    plain_differences = []
    for output in serve(engine, random_prompts([1, 15, 16, 17, 60]), SCORED):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        wanted = rounded_logprobs(model, tokens, kv_cache_dtype, scales)
        # Float32 sums in another order may tip a value to the neighbouring fp8 or int8 number.
        np.testing.assert_allclose(reported(output), wanted, atol=3e-2)
        logprobs = jax.nn.log_softmax(plain_logits(model, tokens), axis=-1)
        plain = np.asarray(logprobs)[np.arange(len(tokens) - 1), tokens[1:]]
        tipped, lost = np.abs(reported(output) - wanted), np.abs(reported(output) - plain)
        assert tipped.mean() < 0.1 * lost.mean()
        plain_differences.append(lost.max())
    assert max(plain_differences) < 0.5


@pytest.mark.parametrize(
    ("kv_cache_dtype", "gain"), [(name, 4 / 3 if "values" in name else 2.0) for name in ALL]
)
def test_a_compressed_pool_holds_twice_the_tokens_in_the_same_bytes(kv_cache_dtype, gain):
    """Against 16-bit weights; the head counts are SmolLM2's and a larger model's."""
    for kv_heads, head_dim in ((3, 64), (8, 128)):
        arch = tiny_arch(kv_heads=kv_heads, q_heads=2 * kv_heads, head_dim=head_dim, layers=2)
        blocks = []
        for name in ("auto", kv_cache_dtype):
            config = EngineConfig(
                kv_cache_dtype=name, memory_fraction=0.001, max_num_seqs=1 << 20
            ).resolved(platform="cpu", max_positions=256)
            dtype = np.dtype(ml_dtypes.bfloat16)
            device = jax.devices()[0]
            blocks.append(
                blocks_that_fit(arch, config, dtype=dtype, device=device, step_bytes=lambda: 0)
            )
            spec = kv_spec(arch, config, num_blocks=3, dtype=dtype)
            arrays = spec.create(jax.devices()[0])
            nbytes = sum(array.nbytes for array in jax.tree.leaves(arrays))
            assert nbytes == 3 * spec.block_bytes
        assert blocks[1] >= 0.95 * gain * blocks[0]


@pytest.mark.parametrize("kv_cache_dtype", ALL)
def test_values_beyond_the_calibrated_range_are_clamped_and_never_nan(kv_cache_dtype):
    """OF01: above 464, a plain cast to float8_e4m3fn gives NaN."""
    model = tiny_model()
    engine = tiny_engine(
        replace(model, kv_calibration=calibration(1e-4)), kv_cache_dtype=kv_cache_dtype
    )
    for output in serve(engine, random_prompts([3, 40]), SCORED):
        assert np.isfinite(reported(output)).all()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_calibration_follows_the_size_of_keys_and_values(kv_cache_dtype):
    """OF03: with scales of 1, keys a hundred times larger and tiny values would lose everything."""
    model = tiny_model()
    params = dict(model.params)
    for layer in range(model.arch.layers):
        name = f"layers.{layer}.attention.qkv"
        group = model.arch.group
        qkv = np.array(params[name])
        qkv[:, :group] /= 100.0
        qkv[:, group] *= 100.0
        qkv[:, group + 1] /= 1000.0
        params[name] = jnp.asarray(qkv)
        params[f"layers.{layer}.attention.out"] = params[f"layers.{layer}.attention.out"] * 1000.0
    engine = tiny_engine(replace(model, params=params), kv_cache_dtype=kv_cache_dtype)
    for output in serve(engine, random_prompts([30, 50]), SCORED):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logprobs = jax.nn.log_softmax(plain_logits(model, tokens), axis=-1)
        plain = np.asarray(logprobs)[np.arange(len(tokens) - 1), tokens[1:]]
        assert np.abs(reported(output) - plain).max() < 0.5
        assert np.corrcoef(reported(output), plain)[0, 1] > 0.99


def test_a_calibration_sees_every_real_token_and_no_padding():
    model = tiny_model()
    arch = model.arch
    short, long = random_prompts([5, PIECE_TOKENS + 7])
    found = calibrate(arch, model.params, [short, long], max_len=256)
    # The first layer's values are a product of the normalised embedding, without attention.
    x = np.asarray(model.params["embed.table"])
    norm = np.asarray(model.params["layers.0.attention_norm.scale"])
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + arch.norm_eps) * norm
    qkv = np.asarray(model.params["layers.0.attention.qkv"])
    v = np.einsum("te,kde->tkd", x, qkv[:, -1])
    np.testing.assert_allclose(found.maxima[0, 1], np.abs(v[short + long]).max((0, 2)), rtol=1e-5)
    # Its keys likewise, rotated: here by complex numbers, at the four places of the context.
    half = arch.head_dim // 2
    k = np.einsum("te,kde->tkd", x, qkv[:, arch.group])
    k = k[..., :half] + 1j * k[..., half:]
    keys = []
    for piece in (short, long[:PIECE_TOKENS], long[PIECE_TOKENS:]):
        for start in (0, 4, 32, 128):
            angle = (start + np.arange(len(piece)))[:, None] * 1e4 ** -(np.arange(half) / half)
            turned = k[piece] * np.exp(1j * angle)[:, None]
            keys.append(np.concatenate([turned.real, turned.imag], axis=-1))
    mean = np.concatenate([part[1:] for part in keys]).mean(0)
    np.testing.assert_allclose(found.key_means[0], mean, atol=1e-4)
    largest = np.abs(np.concatenate(keys) - mean).max((0, 2))
    np.testing.assert_allclose(found.maxima[0, 0], largest, rtol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_what_all_keys_have_in_common_costs_no_precision(kv_cache_dtype):
    """A bias of fifty on the keys' slowest dimensions, as some model families have it."""
    model = tiny_model(qkv_bias=True, rope=RopeConfig(theta=1e8))
    params = dict(model.params)
    for layer in range(model.arch.layers):
        name = f"layers.{layer}.attention.qkv_bias"
        params[name] = params[name].at[:, model.arch.group, 3::4].set(50.0)
    biased = replace(model, params=params)
    errors = []
    for one in (model, biased):
        engine = tiny_engine(one, kv_cache_dtype=kv_cache_dtype)
        (output,) = serve(engine, random_prompts([60]), SCORED)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logprobs = np.asarray(jax.nn.log_softmax(plain_logits(one, tokens), axis=-1))
        plain = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        errors.append(np.abs(reported(output) - plain).mean())
    assert errors[1] < 4 * errors[0] + 1e-3


def test_keys_that_are_kept_lose_nothing_however_far_apart_they_are():
    """One dimension of keys a thousand times the others: an int8 key keeps nothing else."""
    model = tiny_model()
    params = dict(model.params)
    for layer in range(model.arch.layers):
        name = f"layers.{layer}.attention.qkv"
        group = model.arch.group
        qkv = np.array(params[name])
        qkv[:, group, -1] *= 1000.0  # of the slowest rotation, with its partner
        qkv[:, group, 3] *= 1000.0
        qkv[:, :group, -1] /= 1000.0
        qkv[:, :group, 3] /= 1000.0
        params[name] = jnp.asarray(qkv)
    stretched, lost = replace(model, params=params), {}
    for name in ("int8", "int8-values"):
        engine = tiny_engine(stretched, kv_cache_dtype=name)
        (output,) = serve(engine, random_prompts([60]), SCORED)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logprobs = np.asarray(jax.nn.log_softmax(plain_logits(stretched, tokens), axis=-1))
        plain = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
        lost[name] = np.abs(reported(output) - plain).mean()
    assert lost["int8-values"] < 0.1 * lost["int8"]
    assert [x.dtype.name for x in engine.kv_spec.arrays] == ["float32", "int8"]
    assert engine.kv_spec.dtype_name == "float32 keys, int8 values"


def test_calibration_without_a_token_or_with_numbers_that_are_not_finite_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="at least one token"):
        calibrate(model.arch, model.params, [[], []], max_len=256)
    broken = dict(model.params)
    broken["embed.table"] = broken["embed.table"].at[3].set(jnp.nan)
    with pytest.raises(ValueError, match="not finite at"):
        calibrate(model.arch, broken, [[1, 3]], max_len=256)


def test_a_new_calibration_empties_the_cache_and_compiles_nothing():
    """OF03: what was stored with other scales is never shared."""
    engine = tiny_engine(kv_cache_dtype="int8")
    prompt = random_prompts([40])
    first, again = (serve(engine, prompt, SCORED)[0] for _ in range(2))
    other = replace(SCORED, prompt_logprobs=None)
    assert serve(engine, prompt, other)[0].num_cached_tokens == 32
    serve(engine, random_prompts([40], seed=9), other)
    steps = len(engine._runner._compiled)
    engine.calibrate_kv(random_prompts([64], seed=5))
    fresh = serve(engine, prompt, other)[0]
    assert fresh.num_cached_tokens == 0
    assert len(engine._runner._compiled) == steps
    assert reported(first).tolist() == reported(again).tolist()


def test_calibration_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="fp8 and int8, got auto"):
        tiny_engine().calibrate_kv([[1, 2]])
    engine = tiny_engine(kv_cache_dtype="fp8")
    before = engine._runner.kv_scales
    for bad in (128, -1, 2**40, 2**70, 1.5):
        with pytest.raises(ValueError, match=r"token ids must be integers in 0 \.\. 127, got"):
            engine.calibrate_kv([[], [5, bad]])
    assert engine._runner.kv_scales is before
    engine.add_request("a", None, [1, 2, 3], SCORED)
    with pytest.raises(ValueError, match="idle engine, got 1 request"):
        engine.calibrate_kv([[1, 2]])
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*'fp4'"):
        EngineConfig(kv_cache_dtype="fp4")


def test_a_checkpoint_keeps_its_calibration(tmp_path):
    arch = tiny_arch()
    (tmp_path / "params").mkdir()
    with pytest.raises(ValueError, match="native checkpoint"):
        write_kv_calibration(tmp_path, calibration(1.0))
    (tmp_path / "manifest.json").write_text("{}")
    assert read_kv_calibration(tmp_path, arch) is None
    rng = np.random.default_rng(0)
    written = KVCalibration(
        key_means=rng.normal(size=(2, 2, 8)).astype(np.float32),
        maxima=rng.random((2, 2, 2), np.float32),
    )
    write_kv_calibration(tmp_path, written)
    read = read_kv_calibration(tmp_path, arch)
    np.testing.assert_array_equal(read.maxima, written.maxima)
    np.testing.assert_array_equal(read.key_means, written.key_means)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kv_calibration.json", "manifest.json", "params"
    ]  # fmt: skip


def damaged(**changes):
    return json.dumps({**calibration(1.0).to_json(), **changes})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", '"a"', "{}", damaged(maxima=[[[1, 2], [1]]]), damaged(key_means=[1]),
     damaged(maxima=[[[1, 2], [1, float("nan")]]] * 2), damaged(maxima=[[[1, 2], [1, -1]]] * 2),
     damaged(other=1), damaged(maxima="a")],
)  # fmt: skip
def test_a_damaged_calibration_is_refused_by_name(tmp_path, text):
    (tmp_path / "kv_calibration.json").write_text(text)
    with pytest.raises(ValueError, match=r"kv_calibration\.json"):
        read_kv_calibration(tmp_path, tiny_arch())
