"""SentencePiece vocabularies rebuilt from GGUF files, against SentencePiece itself."""

import io
import random
import time
from itertools import product

import numpy as np
import pytest

from convert import CheckpointError, open_checkpoint
from convert.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFTokenizer,
)
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import VARIANTS, random_tensors, tensor_shapes

TEXTS = [
    "",
    " ",
    "  ",
    "hello world",
    " hello  world ",
    "one\ntwo\n\n  three\r\n\tfour",
    "0123456789 3.14 10,000",
    "caf\u00e9 cafe\u0301 \u00fcber \u017elu\u0165ou\u010dk\u00fd",
    "\u6f22\u5b57 \u4f60\u597d\u3002 \u3053\u3093",
    "\U0001f642 and \U0001f468\u200d\U0001f469\u200d\U0001f467!",
    "already \u2581marked",
    "<0x41> is text, not a byte",
    "\x00\x7f",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def words(rng, count):
    """Words of few syllables, so that there is much to merge; some end in blanks."""
    syllables = ["he", "llo", "wor", "ld", "o", "ne", "th", "ree", "caf\u00e9", "12", "3", "\u4f60"]
    return "".join(
        "".join(rng.choices(syllables, k=rng.randint(1, 4))) + rng.choice([" ", " ", "  ", ". "])
        for _ in range(count)
    )


def letters(rng, count):
    """Runs of three letters and blanks, where ways to merge overlap all the time."""
    return "".join(rng.choices("aabbc  ", k=count))


def trained(make, kind="bpe", prefix=True, vocab=340):
    """A SentencePiece model like Llama 2's: bytes, no normalization, runs of blanks kept."""
    spm = pytest.importorskip("sentencepiece")
    rng, model = random.Random(0), io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([make(rng, 12) for _ in range(500)]),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_by_whitespace=make is words,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def fields_of(model, **more):
    """What llama.cpp's converter writes of a SentencePiece model."""
    ids = range(model.get_piece_size())
    kinds = [(model.is_unknown, UNKNOWN), (model.is_control, CONTROL), (model.is_byte, BYTE)]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [next((k for test, k in kinds if test(i)), NORMAL) for i in ids],
        "unknown_token_id": model.unk_id(),
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
    } | more


def by_hand(pieces, **more):
    """A vocabulary of given pieces with their scores, behind the special ones and the bytes."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [float(score) for score in pieces.values()],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more


def through_a_file(tmp_path, fields):
    """Write a GGUF file, read it, and hand over its tokenizer."""
    config = VARIANTS["llama"] | {"vocab_size": len(fields["tokens"])}
    tensors = random_tensors(tensor_shapes(config), np.float32)
    write_gguf(tmp_path / "m.gguf", config, tensors, arch="llama", tokenizer=fields)
    tokenizer = open_checkpoint(tmp_path / "m.gguf").tokenizer
    assert tokenizer is not None
    return tokenizer


def loaded(directory, fields):
    from transformers import AutoTokenizer

    metadata = {f"tokenizer.ggml.{k}": value for k, value in fields.items() if value is not None}
    GGUFTokenizer(metadata, "m.gguf").save(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("make", [words, letters])
@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_and_text_are_sentencepieces_own(tmp_path, make, prefix):
    from transformers import AutoTokenizer

    theirs = trained(make, prefix=prefix)
    through_a_file(tmp_path, fields_of(theirs, add_space_prefix=prefix)).save(tmp_path / "t")
    ours = AutoTokenizer.from_pretrained(tmp_path / "t", local_files_only=True)
    rng, longest = random.Random(1), 0
    for text in [*TEXTS, *(make(rng, rng.randint(0, 40)) for _ in range(500))]:
        wanted = theirs.encode(text)
        assert ids(ours, text) == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted) == text.replace("\u2581", " ")
        longest = max(longest, *(len(theirs.id_to_piece(i)) for i in wanted), 0)
    assert longest >= 6  # or else nothing was merged


def test_a_character_cut_short_decodes_as_in_sentencepiece(tmp_path):
    theirs = trained(words)
    ours = loaded(tmp_path, fields_of(theirs))
    whole = [theirs.piece_to_id(f"<0x{byte:02X}>") for byte in "\U0001f642".encode()]
    hello = theirs.encode("hello")
    for tokens in ([*hello, *whole], [*hello, *whole[:2], *hello], [*hello, *whole[1:]]):
        assert ours.decode(tokens) == theirs.decode(tokens)


def test_a_higher_score_wins_over_an_earlier_place(tmp_path):
    pieces = {"\u2581": -9, "a": -10, "b": -11, "c": -12, "bc": -1, "ab": -2}
    assert loaded(tmp_path, by_hand(pieces)).tokenize("abcab") == ["\u2581", "a", "bc", "ab"]


def test_a_file_with_merges_needs_no_scores(tmp_path):
    """Files made from a tokenizer.json have merges, and -1000 for every score."""
    pieces = dict.fromkeys(["\u2581", "a", "b", "c", "ab", "bc"], -1000)
    ours = loaded(tmp_path, by_hand(pieces, merges=["b c", "a b"]))
    assert ours.tokenize("abcab") == ["\u2581", "a", "bc", "ab"]


@pytest.mark.parametrize("bos", [None, True, False])
@pytest.mark.parametrize("eos", [None, True, False])
def test_bos_and_eos_surround_a_text_as_the_file_says(tmp_path, bos, eos):
    """Said nothing, there is BOS and no EOS."""
    fields = by_hand({"\u2581": -1, "a": -2}, add_bos_token=bos, add_eos_token=eos)
    tokenizer = loaded(tmp_path, fields)
    wanted = [1] * (bos is not False) + [259, 260] + [2] * (eos is True)
    assert tokenizer("a").input_ids == wanted
    assert tokenizer("a", "a").input_ids == wanted * 2
    assert tokenizer.decode(wanted, skip_special_tokens=True) == "a"


def test_control_and_user_defined_tokens_are_whole(tmp_path):
    """As in llama.cpp, the text after one begins with a space of its own."""
    pieces = {"\u2581": -1, "a": -2, "[INST]": 0, "\u2581a": -3}
    fields = by_hand(pieces)
    fields["token_type"][261] = USER_DEFINED
    tokenizer = loaded(tmp_path, fields)
    assert ids(tokenizer, "<s>a[INST]a</s>") == [1, 262, 261, 262, 2]
    assert tokenizer.decode([1, 262, 261, 2], skip_special_tokens=True) == "a[INST]"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_without_bytes_a_run_of_unknown_characters_is_one_token(tmp_path):
    fields = by_hand({"\u2581": -1, "a": -2})
    for name in ("tokens", "scores", "token_type"):
        del fields[name][3:259]
    fields["unknown_token_id"] = None  # then it is the token of that type
    assert ids(loaded(tmp_path, fields), "a\u6f22\u5b57a") == [3, 4, 0, 4]


def test_a_unigram_model_is_refused(tmp_path):
    theirs = trained(words, kind="unigram")
    with pytest.raises(CheckpointError, match="Unigram"):
        through_a_file(tmp_path, fields_of(theirs))


AB = {"a": -5, "b": -6, "ab": -1}


@pytest.mark.parametrize(
    ("pieces", "more", "named"),
    [
        (AB, {"scores": None}, "'scores'"),
        (AB, {"scores": [0.0]}, "1 scores for 262 tokens"),
        (AB | {"ab": float("nan")}, {}, "'ab' has the score nan"),
        (AB | {"ba": -1}, {}, "'ab' and 'ba' have the same score -1.0"),
        (AB | {"abc": -2}, {}, "'abc' has the character 'c'"),
        (AB, {"token_type": [2, 3, 3] + [6] * 256 + [1, 1, UNUSED]}, "unused piece 'ab'"),
        (AB, {"merges": ["a c"]}, r"merge \('a', 'c'\)"),
        (AB, {"bos_token_id": None}, "bos_token_id is absent"),
        (AB, {"eos_token_id": None, "add_eos_token": True}, "eos_token_id is absent"),
        (AB, {"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        (AB, {"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        (
            AB,
            {"unknown_token_id": None, "token_type": [3] * 3 + [6] * 256 + [1] * 3,
             "tokens": ["<unk>", "<s>", "</s>", "<0xZZ>", *BYTES[1:], *AB]},
            "neither all bytes nor unknown_token_id",
        ),
    ],
)  # fmt: skip
def test_what_would_not_be_sentencepieces_tokens_is_refused(tmp_path, pieces, more, named):
    with pytest.raises(CheckpointError, match=named):
        through_a_file(tmp_path, by_hand(pieces, **more))


def test_a_vocabulary_of_llama_2s_size_takes_seconds(tmp_path):
    made = ["".join(piece) for size in range(1, 6) for piece in product("abcdefgh", repeat=size)]
    pieces = {piece: -rank for rank, piece in enumerate(["\u2581", *made[:31_740]])}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in by_hand(pieces).items()}
    start = time.process_time()
    GGUFTokenizer(metadata, "m.gguf").save(tmp_path)
    assert time.process_time() - start < 5  # well below one second on an idle core
