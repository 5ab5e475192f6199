"""Tokenizers rebuilt from GGUF vocabularies, against transformers' own classes."""

import json

import numpy as np
import pytest

from convert import CheckpointError, open_checkpoint
from convert.gguf_tokenizer import SPLITTERS, GGUFTokenizer
from tests.support.gguf_files import BYTES, tokenizer_fields, write_gguf
from tests.support.tiny_models import VARIANTS, random_tensors, tensor_shapes

SPACE = BYTES[ord(" ")]
MERGES = (
    "h e", "l l", "he ll", "hell o", f"{SPACE} w", "o r", "1 2", "12 3", "2 3", "e d",
    f"{SPACE} {SPACE}", "' s", f"{BYTES[ord(chr(10))]} {BYTES[ord(chr(10))]}", "w or", ". .",
)  # fmt: skip
TEXTS = [
    "",
    "hello world",
    "hello  world,   12345 she's ..!?\n\n  tabs\tand é ü 漢字 🙂 end ",
    "e\u0301 combines, \u00e9 does not; A1b2C3 x=10_000;",
    "<|start|>hello<|end|> <think>12</think>",
    "DON'T don't I'LL '12\r\n\r\n   indented",
    " ",
    "\n",
]


def metadata(pre, **fields):
    tokenizer = tokenizer_fields(300, pre, MERGES, **fields)
    return {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}


def rebuilt(directory, pre, **fields):
    from transformers import AutoTokenizer

    GGUFTokenizer(metadata(pre, **fields), "m.gguf").save(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("pre", sorted(SPLITTERS))
def test_text_survives_the_round_trip(tmp_path, pre):
    tokenizer = rebuilt(tmp_path, pre)
    for text in TEXTS:
        again = tokenizer.decode(ids(tokenizer, text))
        # Qwen 2 composes accents, so that both spellings of a letter are the same tokens.
        assert again == (text.replace("e\u0301", "\u00e9") if pre == "qwen2" else text)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_tokens_are_those_of_transformers_own_class(tmp_path, pre):
    from transformers import GPT2Tokenizer, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    fields = tokenizer_fields(300, pre, MERGES)
    vocab = {token: index for index, token in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    if pre == "llama-bpe":
        theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
        from tokenizers import Regex, pre_tokenizers

        split = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        theirs.backend_tokenizer.normalizer = None
    else:
        theirs = {"qwen2": Qwen2Tokenizer, "gpt-2": GPT2Tokenizer}[pre](vocab=vocab, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|start|>"]})
    theirs.add_tokens(["<think>"])
    ours = rebuilt(tmp_path, pre)
    for text in TEXTS:
        assert ids(ours, text) == ids(theirs, text), text


def test_smollm_digits_stand_alone(tmp_path):
    """The merges 1+2, 12+3 and 2+3 exist and are never used; elsewhere they are."""
    digits = [BYTES[ord(digit)] for digit in "12345"]
    smollm = rebuilt(tmp_path / "a", "smollm")
    assert smollm.tokenize("12345") == digits
    assert smollm.tokenize("hello123") == ["hello", *digits[:3]]
    gpt2 = rebuilt(tmp_path / "b", "gpt-2")
    assert gpt2.tokenize("12345") == ["123", *digits[3:]]


def test_llama3_takes_a_whole_word_that_no_merge_leads_to(tmp_path):
    """Llama 3 looks a word up before it merges."""
    fields = tokenizer_fields(300, "llama-bpe", MERGES)
    fields["tokens"][-1], fields["token_type"][-1] = "zebra", 1
    for pre, wanted in {"llama-bpe": ["zebra"], "qwen2": list("zebra")}.items():
        data = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
        data["tokenizer.ggml.pre"] = pre
        GGUFTokenizer(data, "m.gguf").save(tmp_path / pre)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tmp_path / pre, local_files_only=True)
        assert tokenizer.tokenize("zebra") == wanted


@pytest.mark.parametrize(
    ("pre", "stated", "begins"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_a_text_begins_with_bos_where_the_model_was_trained_so(tmp_path, pre, stated, begins):
    fields = {} if stated is None else {"add_bos_token": stated}
    tokenizer = rebuilt(tmp_path, pre, **fields)
    assert tokenizer("hello").input_ids == [1] * begins + ids(tokenizer, "hello")


def test_control_tokens_are_whole_and_special(tmp_path):
    tokenizer = rebuilt(tmp_path, "smollm")
    encoded = ids(tokenizer, "<|start|><think>hello<|end|>")
    assert encoded[0] == 1 and encoded[1] == 2 and encoded[-1] == 0
    assert tokenizer.decode(encoded, skip_special_tokens=True) == "<think>hello"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, 0)
    assert len(tokenizer) == 300


def test_chat_template_is_carried_over(tmp_path):
    from transformers import AutoTokenizer

    template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    data = metadata("smollm") | {"tokenizer.chat_template": template}
    GGUFTokenizer(data, "m.gguf").save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|start|>hello<|end|>"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pre": "made-up"}, "'made-up'"),
        ({"pre": None}, "'pre'"),
        ({"model": "t5"}, "'t5'"),
        ({"model": None}, "'model'"),
        ({"merges": None}, "merges"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"merges": ["h e", "h z"]}, r"merge \('h', 'z'\)"),
        ({"merges": ["he"]}, "merge"),
        ({"token_type": [3]}, "1 token types for 300 tokens"),
        ({"bos_token_id": 300}, "bos token id 300"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is absent"),
        ({"eos_token_id": None, "add_eos_token": True}, "eos_token_id is absent"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused_by_name(tmp_path, fields, named):
    config = VARIANTS["llama"] | {"vocab_size": 300}
    tokenizer = tokenizer_fields(300, "smollm", MERGES) | fields
    tensors = random_tensors(tensor_shapes(config), np.float32)
    write_gguf(tmp_path / "m.gguf", config, tensors, arch="llama", tokenizer=tokenizer)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(tmp_path / "m.gguf")


def test_saved_files_name_no_class_that_would_rebuild_the_split(tmp_path):
    """Some transformers classes replace the pre-tokenizer that tokenizer.json states."""
    GGUFTokenizer(metadata("smollm"), "m.gguf").save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
