"""Configurations: what is taken, what is harmless, and what is refused by name."""

import math

import pytest

from convert import CheckpointError
from convert.families import FAMILIES, read_arch
from convert.families.llamalike import IGNORED
from convert.generation_fields import read_generation
from pagedjax.layers.rope import inverse_frequencies
from pagedjax.models import Llama3Scaling, RopeConfig
from tests.support.tiny_models import VARIANTS

LLAMA = VARIANTS["llama"]
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def arch_of(**changes):
    """Architecture of the tiny Llama with fields changed, or left out where the value is `...`."""
    config = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
    return read_arch(config, "config.json")[0]


def notes_of(config):
    return read_arch(config, "config.json")[1]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_is_read_as_transformers_reads_it(variant):
    from transformers import AutoConfig

    config = VARIANTS[variant]
    theirs = AutoConfig.for_model(**{k: v for k, v in config.items() if k != "architectures"})
    arch = read_arch(config, "config.json")[0]
    assert arch.q_heads == theirs.num_attention_heads
    assert arch.kv_heads == theirs.num_key_value_heads
    assert arch.head_dim == (getattr(theirs, "head_dim", None) or arch.embed // arch.q_heads)
    assert arch.rope.theta == theirs.rope_parameters["rope_theta"]
    assert arch.tied == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention"] * arch.layers
    slides = [getattr(theirs, "sliding_window", None) if k[0] == "s" else None for k in kinds]
    assert list(arch.windows) == slides


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1000000.0, "rope_scaling": None},
        {"rope_theta": 1000000},
        {"rope_theta": "1e6"},
        {"rope_theta": 1000000.0, "rope_scaling": {}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_theta": 1e6, "partial_rotary_factor": 1.0},
    ],
)
def test_every_spelling_of_the_base_means_the_same(rope):
    """CV15, CV18."""
    assert arch_of(**rope).rope == RopeConfig(theta=1e6)


def test_a_missing_base_is_the_default_and_is_said():
    """CV15: never in silence."""
    config = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    assert read_arch(config, "config.json")[0].rope.theta == 10000.0
    assert any("rope_theta" in note for note in notes_of(config))
    assert notes_of(LLAMA) == []


@pytest.mark.parametrize(
    "scaling",
    [
        SCALING,
        {("type" if k == "rope_type" else k): v for k, v in SCALING.items()},
        SCALING | {"type": "llama3"},
        SCALING | {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        SCALING | {"attention_factor": None},
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_in_every_spelling(scaling, field):
    """CV18."""
    assert arch_of(**{field: scaling}).rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


@pytest.mark.parametrize(
    ("head_dim", "factor", "expected"),
    [
        (
            128,
            8,
            {
                0: 1.0,
                28: 0.00321144599,
                29: 0.00216657076,
                32: 0.000524846161,
                36: 7.78465527e-05,
                63: 3.06892599e-07,
            },
        ),
        (
            64,
            32,
            {
                14: 0.00321144599,
                15: 0.00129054793,
                16: 0.000429556797,
                18: 1.94616382e-05,
                31: 9.41830673e-08,
            },
        ),
    ],
)
def test_llama3_scaling_gives_the_published_frequencies(head_dim, factor, expected):
    """CV17: the table itself is compared; short texts hide a scaling that is not applied."""
    scaling = SCALING | {"factor": factor}
    arch = arch_of(head_dim=head_dim, rope_theta=500000.0, rope_scaling=scaling)
    table = inverse_frequencies(arch.rope, arch.head_dim)
    for index, value in expected.items():
        assert math.isclose(table[index], value, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, kind)
        for kind in ("longrope", "dynamic", "linear", "yarn", "made_up")
    ]
    + [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": SCALING | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": SCALING | {"type": "linear"}}, "contradict"),
        ({"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}}, "contradict"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta"),
        ({"rope_scaling": SCALING | {"beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, "factor"),
        ({"rope_scaling": SCALING | {"factor": None}}, "factor"),
        ({"rope_scaling": SCALING | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_theta": "much"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
    ],
)
def test_a_rope_that_is_not_understood_is_refused_by_name(changes, named):
    """CV18, CV20: nothing falls back to plain rotation in silence."""
    with pytest.raises(CheckpointError, match=named):
        arch_of(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"sliding_window": 512}, "sliding_window"),  # a Llama has none
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"auto_map": {"AutoModel": "mine.py"}}, "auto_map"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "gemma3"}, "gemma3"),
        ({"model_type": ...}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"head_dim": ..., "hidden_size": 66}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"vocab_size": -1}, "vocab"),
    ],
)
def test_a_field_that_changes_the_maths_is_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named):
        arch_of(**changes)


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_fields_that_say_nothing_about_the_maths_are_let_through(field):
    assert arch_of(**{field: "anything"}) == arch_of()


def test_null_counts_as_absent():
    assert arch_of(attn_logit_softcapping=None, quantization_config=None) == arch_of()


@pytest.mark.parametrize(
    "method",
    ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "made_up"],
)
def test_quantized_checkpoints_are_refused_by_name(method):
    """CV33."""
    with pytest.raises(CheckpointError, match=method):
        arch_of(quantization_config={"quant_method": method, "bits": 4})


def test_head_dim_is_taken_from_the_field_where_it_is_stated():
    """CV26: hidden / heads would be 10."""
    arch = arch_of(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert arch.head_dim == 16
    assert arch.kv_elements_per_token == arch.layers * 2 * 2 * 16


def test_a_llama_without_key_value_heads_has_one_per_query_head():
    assert arch_of(num_key_value_heads=...).kv_heads == LLAMA["num_attention_heads"]


@pytest.mark.parametrize("variant", ["mistral", "qwen2", "qwen3"])
def test_other_families_must_state_their_key_value_heads(variant):
    config = {k: v for k, v in VARIANTS[variant].items() if k != "num_key_value_heads"}
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        read_arch(config, "config.json")


def test_mistral_without_a_window_field_is_not_full_attention():
    config = {k: v for k, v in VARIANTS["mistral"].items() if k != "sliding_window"}
    assert read_arch(config, "config.json")[0].windows == (4096, 4096)
    assert any("sliding_window" in note for note in notes_of(config))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 0}, [None] * 3),
        ({"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3}, [None] * 3),
        ({"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}, [20] * 3),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 20,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [20, None, 20],
        ),
    ],
)
@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
def test_qwen_windows_follow_the_layers_that_the_fields_name(variant, changes, windows):
    config = VARIANTS[variant] | {"num_hidden_layers": 3} | changes
    assert list(read_arch(config, "config.json")[0].windows) == windows


@pytest.mark.parametrize(
    "kinds", [["sliding_attention"] * 2, ["full_attention"], ["chunked_attention"] * 2, "full"]
)
def test_qwen_layer_types_that_make_no_sense_are_refused(kinds):
    config = VARIANTS["qwen2"] | {"use_sliding_window": False, "layer_types": kinds}
    with pytest.raises(CheckpointError, match="layer_types"):
        read_arch(config, "config.json")


def test_every_family_has_a_variant_under_test():
    assert {config["model_type"] for config in VARIANTS.values()} == set(FAMILIES)


def test_generation_config_wins_over_config():
    """CV38: the list of end-of-text ids survives."""
    config = {"eos_token_id": 1, "bos_token_id": 5, "temperature": 0.5}
    said = {"eos_token_id": [1, 7], "top_k": 20, "do_sample": True, "repetition_penalty": 1.05}
    read = read_generation(said, config)
    assert read.eos_ids == (1, 7)
    assert (read.bos_id, read.pad_id) == (5, None)
    assert (read.temperature, read.top_k, read.do_sample) == (0.5, 20, True)
    assert read.repetition_penalty == 1.05


@pytest.mark.parametrize(
    ("value", "ids"), [(2, (2,)), ([3, 2, 3], (3, 2)), (None, ()), (-1, ()), ([], ())]
)
def test_end_of_text_may_be_one_id_or_several_or_none(value, ids):
    assert read_generation({}, {"eos_token_id": value}).eos_ids == ids


@pytest.mark.parametrize(
    "bad", [{"eos_token_id": "</s>"}, {"eos_token_id": [True]}, {"temperature": "hot"}]
)
def test_malformed_generation_defaults_are_refused(bad):
    with pytest.raises(CheckpointError, match=next(iter(bad))):
        read_generation(bad, {})
