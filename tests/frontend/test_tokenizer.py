"""A checkpoint's own tokenizer, in the two forms that decoder-only models come with."""

import random
import socket

import pytest
from tokenizers import Tokenizer as Backend

from pagedjax.tokenizer import TextStream, Tokenizer
from tests.support.tiny_tokenizers import byte_level, save_tokenizer, sentencepiece_like


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request, tmp_path_factory):
    return Tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param))


TEXTS = ["Hello world", " to be", "you  are", "žluť 🔥", "你好 👨‍👩‍👧", "a\n\tb", "123", "é", " "]


def test_text_survives_the_round_trip(tokenizer):
    for text in TEXTS:
        if not text.startswith(" "):  # word-marking tokenizers take a first space for the mark
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_streamed_text_equals_the_text_of_all_tokens(tokenizer):
    """SA32, on the tokens of real tokenizers."""
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        stream = TextStream(tokenizer)
        chunks = [stream.push([token])[0] for token in tokens]
        assert "".join(chunks) + stream.flush() == tokenizer.decode(tokens)
        assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("seed", range(5))
def test_streamed_text_is_the_same_in_runs_of_tokens(tokenizer, seed):
    choose = random.Random(seed)
    tokens = [token for text in TEXTS for token in tokenizer.encode(text)]
    for place in range(0, len(tokens), 7):  # control tokens, and bytes of characters cut off
        tokens.insert(place, choose.choice([tokenizer.eos_id, choose.choice(tokens)]))
    stream, each = TextStream(tokenizer), TextStream(tokenizer)
    start = 0
    while start < len(tokens):
        run = tokens[start : start + choose.choice([1, 2, 3, 20])]
        start += len(run)
        text, stopped_by = stream.push(run)
        assert text == "".join(each.push([token])[0] for token in run)
        assert (stopped_by, stream.num_tokens) == (None, start)
    assert stream.push([]) == ("", None)


def test_a_run_of_tokens_is_decoded_at_once(tokenizer, monkeypatch):
    tokens, decode, calls = tokenizer.encode("to be or not to be. " * 20), tokenizer.decode, []

    def counted(token_ids, *, skip_special_tokens=True):
        calls.append(len(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    assert stream.push(tokens)[0] + stream.push(tokens)[0] == decode(tokens + tokens)
    assert len(calls) == 3  # in the second push once more, of what it leaves behind


def test_control_tokens_in_between_do_not_swallow_a_space(tokenizer):
    tokens = [*tokenizer.encode("to"), *tokenizer.encode("be or")]  # BOS in the middle
    stream = TextStream(tokenizer)
    streamed = "".join(stream.push([token])[0] for token in tokens)
    assert streamed == tokenizer.decode(tokens)


@pytest.mark.parametrize("at_once", [1, 2, 7])
@pytest.mark.parametrize("kind", ["control", "outside"])
def test_a_run_of_tokens_that_are_left_out_is_not_decoded_again(
    tokenizer, monkeypatch, kind, at_once
):
    """As models write them under `ignore_eos`: decoding the whole run anew would be quadratic."""
    token = tokenizer.eos_id if kind == "control" else tokenizer.vocab_size + 5
    run = [*tokenizer.encode("to be"), *[token] * 300, *tokenizer.encode("or not")]
    wanted, decode, decoded = tokenizer.decode(run * 2), tokenizer.decode, []

    def counted(token_ids, *, skip_special_tokens=True):
        decoded.append(len(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    text, _ = stream.push(run)  # may be its own context, but without what is left out
    for start in range(0, len(run), at_once):
        text += stream.push(run[start : start + at_once])[0]
    assert text == wanted and stream.num_tokens == 2 * len(run)
    assert max(decoded) < 40 and len(decoded) < 40


def test_a_token_is_left_out_if_every_text_is_the_same_without_it(tokenizer):
    words = tokenizer.encode("to be or", add_special_tokens=False)
    left_out = set()
    for token in [*range(tokenizer.vocab_size + 3), -1, 2**31, 2**32, 2**40]:
        for skip in (True, False):
            texts = {
                tokenizer.decode([*words, *more, *words], skip_special_tokens=skip)
                for more in ([], [token], [token, token])
            }
            is_left_out = tokenizer.is_left_out(token, skip_special_tokens=skip)
            assert is_left_out == (len(texts) == 1), (token, skip)
            if is_left_out:
                left_out.add((token, skip))
    assert len(left_out) == 3 + 2 * 7


def test_control_tokens_are_kept_on_request(tokenizer):
    tokens = tokenizer.encode("to be")
    assert tokenizer.decode(tokens, skip_special_tokens=False).startswith("<s>")
    stream = TextStream(tokenizer, skip_special_tokens=False)
    text = "".join(stream.push([token])[0] for token in tokens)
    assert text == tokenizer.decode(tokens, skip_special_tokens=False)


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer):
    """SA36."""
    tokens = tokenizer.encode("to be")
    outside = [tokenizer.vocab_size, 155_000, 2**31, 2**40, -1]
    assert tokenizer.decode([outside[0], *tokens, *outside[1:]]) == "to be"
    stream = TextStream(tokenizer)
    mixed = [tokens[0], outside[0], *tokens[1:], outside[1]]
    assert "".join(stream.push([token])[0] for token in mixed) == "to be"


def test_the_beginning_of_text_comes_from_the_checkpoint_and_is_never_doubled(tokenizer):
    bos = tokenizer.encode("")
    assert len(bos) == 1
    assert tokenizer.encode("to be")[0] == bos[0]
    chat = tokenizer.chat([{"role": "user", "content": "to be"}])
    assert chat.count(bos[0]) == 1
    assert tokenizer.decode(chat, skip_special_tokens=False).startswith("<s><|turn|>")


def test_a_tokenizer_without_beginning_of_text_encodes_nothing_as_nothing(tmp_path):
    """SC20: such a checkpoint turns the empty prompt into no tokens."""
    assert Tokenizer(save_tokenizer(tmp_path, byte_level, bos=False)).encode("") == []


def test_chat_follows_the_template(tokenizer):
    messages = [
        {"role": "user", "content": "to be"},
        {"role": "assistant", "content": "or"},
        {"role": "user", "content": "not"},
    ]
    assert tokenizer.render_chat(messages) == (
        "<s><|turn|>user\nto be<|turn|>assistant\nor<|turn|>user\nnot<|turn|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ("hello", "list of messages"),
        (["hello"], "list of messages"),
        ([{"role": "user"}], "role and content"),
        ([{"content": "hi"}], "role and content"),
        ([{"role": "system", "content": "x"}], "no system role"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_refused(tokenizer, messages, complaint):
    with pytest.raises(ValueError, match=complaint):
        tokenizer.chat(messages)


def test_a_checkpoint_without_template_cannot_chat(tmp_path):
    tokenizer = Tokenizer(save_tokenizer(tmp_path, byte_level, template=None))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", ["emoji \ud83d", "x \ude00 y"])
def test_half_a_surrogate_pair_is_refused(tokenizer, text):
    """SV19."""
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode(text)


def test_a_prompt_that_is_not_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match="got bytes"):
        tokenizer.encode(b"x")


def test_sizes_and_end_of_text(tokenizer):
    assert tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False) == "</s>"
    assert tokenizer.vocab_size > max(tokenizer.encode("Hello world"))


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path):
    save_tokenizer(tmp_path, byte_level)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("to be or not to be")) == "to be or not to be"
    assert len(tokenizer.encode("to")) < 8


def test_a_template_in_its_own_file_is_used(tmp_path):
    save_tokenizer(tmp_path, byte_level, template=None)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_unusable_directories_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        with pytest.raises(ValueError, match="wanted a directory"):
            Tokenizer(tmp_path / name)
    cut = save_tokenizer(tmp_path / "cut", byte_level) / "tokenizer.json"
    cut.write_bytes(cut.read_bytes()[:1000])
    with pytest.raises(ValueError, match="no usable tokenizer"):
        Tokenizer(cut.parent)


def test_no_connection_is_opened(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was attempted")

    save_tokenizer(tmp_path, byte_level)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    Tokenizer(tmp_path).chat([{"role": "user", "content": "hi"}])
