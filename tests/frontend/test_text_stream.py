"""Streamed text: whole characters, and stop strings wherever the tokens cut them."""

import random

import pytest

from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import TextStream
from tests.support.echo_engine import ByteTokenizer, PieceTokenizer

PIECES = ["ABC", "DEF", "G", "HI", "J", "K"]


def run(stream, tokens):
    """Chunks as they come, what stopped the text, and the flushed end."""
    chunks, stopped_by = [], None
    for token in tokens:
        text, stopped_by = stream.push([token])
        chunks.append(text)
        if stopped_by is not None:
            break
    return chunks, stopped_by, stream.flush()


def stream_of(pieces, **options):
    return TextStream(PieceTokenizer(pieces), **options)


def test_a_stop_string_over_several_tokens_never_leaks():
    """SA27."""
    chunks, stopped_by, rest = run(stream_of(PIECES, stop=["DEFGHIJ"]), range(6))
    assert chunks == ["ABC", "", "", "", ""]
    assert (stopped_by, rest) == ("DEFGHIJ", "")


def test_a_stop_string_that_is_kept_is_delivered_whole_and_nothing_after_it():
    """SA27: with the string kept there is nothing to hold back."""
    stream = stream_of(PIECES, stop=["DEFGHIJ"], include_stop_str_in_output=True)
    chunks, stopped_by, rest = run(stream, range(6))
    assert chunks == ["ABC", "DEF", "G", "HI", "J"]
    assert (stopped_by, rest) == ("DEFGHIJ", "")


@pytest.mark.parametrize("keep", [False, True])
def test_text_that_only_began_like_a_stop_string_is_delivered_at_the_end(keep):
    """SA28."""
    stream = stream_of(PIECES, stop=["DEFGHIJ"], include_stop_str_in_output=keep)
    chunks, stopped_by, rest = run(stream, range(3))
    assert "".join(chunks) + rest == "ABCDEFG"
    assert stopped_by is None


def test_text_that_cannot_begin_a_stop_string_is_sent_at_once():
    """SA28: no more is held back than could match."""
    pieces = ["xyz", "DEFx", "D", "DE", "q"]
    chunks, _, rest = run(stream_of(pieces, stop=["DEFGHIJ"]), range(5))
    assert (chunks, rest) == (["xyz", "DEFx", "", "D", "DEq"], "")


def test_text_after_the_stop_string_in_the_same_token_is_dropped():
    for keep, wanted in ((False, "one"), (True, "one##")):
        stream = stream_of(["one", "##tail"], stop="##", include_stop_str_in_output=keep)
        chunks, stopped_by, _ = run(stream, range(2))
        assert ("".join(chunks), stopped_by) == (wanted, "##")


def test_the_first_complete_stop_string_counts_and_of_those_the_longest():
    assert run(stream_of(["xabcd"], stop=["abcd", "bc"]), [0])[:2] == (["xa"], "bc")
    assert run(stream_of(["xabc"], stop=["bc", "abc", "c"]), [0])[:2] == (["x"], "abc")


def test_a_stop_string_complete_before_min_tokens_is_ordinary_text():
    """SA18."""
    pieces = ["a", "END", "b", "EN", "D", "c"]
    stream = stream_of(pieces, stop=["END"], min_tokens=4)
    chunks, stopped_by, _ = run(stream, range(6))
    assert ("".join(chunks), stopped_by, stream.num_tokens) == ("aENDb", "END", 5)


def test_a_match_that_min_tokens_let_pass_does_not_end_the_text_later():
    """The tail `ab` of a longer stop string contains `b`, complete one token too early."""
    stream = stream_of(["ab", "x", "b"], stop=["abc", "b"], min_tokens=2)
    chunks, stopped_by, _ = run(stream, range(3))
    assert ("".join(chunks), stopped_by, stream.num_tokens) == ("abx", "b", 3)


def test_tokens_after_the_stop_in_one_push_are_ignored_and_counted_out():
    stream = stream_of(PIECES, stop=["G"])
    assert stream.push([0, 1, 2, 3, 4]) == ("ABCDEF", "G")
    assert stream.num_tokens == 3
    with pytest.raises(ValueError, match="already been ended by 'G'"):
        stream.push([5])


@pytest.mark.parametrize(
    "text", ["a 🔥 ď 你", "👨‍👩‍👧‍👦", "plain", "ďďď", "e\u0301", "\U0010ffff\x7f"]
)
def test_characters_split_over_tokens_come_whole(text):
    """SA32: one token per byte of emoji, Czech letters, joined emoji and CJK."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    chunks, _, rest = run(TextStream(tokenizer), tokens)
    assert "".join(chunks) + rest == text == tokenizer.decode(tokens)
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_text_before_an_incomplete_character_does_not_wait_for_it():
    stream = TextStream(PieceTokenizer(["a", "b\ufffd"]))
    assert stream.push([0, 1]) == ("ab", None)


def test_a_character_that_is_never_completed_is_dropped():
    """SA32: the end by `max_tokens` may fall into a character."""
    tokens = list("né".encode()[:-1])
    chunks, _, rest = run(TextStream(ByteTokenizer()), tokens)
    assert "".join(chunks) + rest == "n"


def test_bytes_that_form_no_character_become_replacement_marks():
    tokens = [*b"a", 0xFF, 0xFE, *b"b"]
    chunks, _, rest = run(TextStream(ByteTokenizer()), tokens)
    assert "".join(chunks) + rest == "a\ufffd\ufffdb"


def test_a_stop_string_inside_split_characters_is_found():
    text = "ab🔥cd"
    chunks, stopped_by, _ = run(TextStream(ByteTokenizer(), stop="🔥"), text.encode())
    assert ("".join(chunks), stopped_by) == ("ab", "🔥")


def test_ids_outside_the_vocabulary_are_empty_text():
    """SA36: a padded output table lets them be sampled."""
    chunks, _, rest = run(TextStream(ByteTokenizer()), [*b"a", 300, 155000, *"é".encode()])
    assert "".join(chunks) + rest == "aé"


def expected(text, stops, keep):
    """Read the text character by character: the specification, without any holding back."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if keep else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(200))
def test_the_result_does_not_depend_on_how_tokens_cut_the_text(seed):
    """Random texts over two letters, where stop strings overlap themselves and each other."""
    rng = random.Random(seed)
    pieces = ["".join(rng.choices("ab🔥", k=rng.randint(0, 4))) for _ in range(12)]
    stops = ["".join(rng.choices("ab🔥", k=rng.randint(2, 6))) for _ in range(rng.randint(1, 3))]
    keep = rng.random() < 0.5
    stream = stream_of(pieces, stop=stops, include_stop_str_in_output=keep)
    chunks, stopped_by, rest = run(stream, range(len(pieces)))
    assert ("".join(chunks) + rest, stopped_by) == expected("".join(pieces), stops, keep)


@pytest.mark.parametrize("seed", range(50))
def test_held_text_is_exactly_what_could_begin_a_stop_string(seed):
    """SA28, checked after every token against a plain search over all ends of the text."""
    rng = random.Random(seed)
    pieces = ["".join(rng.choices("ab", k=rng.randint(1, 3))) for _ in range(10)]
    stops = ["".join(rng.choices("abc", k=5)) + "c" for _ in range(2)]
    stream, sent, text = stream_of(pieces, stop=stops), "", ""
    for token, piece in enumerate(pieces):
        chunk, stopped_by = stream.push([token])
        sent, text = sent + chunk, text + piece
        assert stopped_by is None
        ends = (text[start:] for start in range(len(text) + 1))
        held = next(end for end in ends if any(stop.startswith(end) for stop in stops))
        assert sent + held == text


def test_params_set_up_the_stream():
    params = SamplingParams(stop="G", include_stop_str_in_output=True, min_tokens=2, max_tokens=9)
    stream = TextStream.for_params(PieceTokenizer(["G", "aG"]), params)
    assert stream.push([0, 1]) == ("GaG", "G")


class CountingTokenizer(ByteTokenizer):
    """Knows how many tokens it has decoded."""

    num_decoded = 0

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("pattern", [b"\x9f", b"\xf0\x9f", b"\xe4\xbd\xff"])
def test_a_long_run_of_bytes_that_form_no_character_is_decoded_in_time_that_grows_with_it(pattern):
    tokens = (pattern * 2000)[:2000]
    tokenizer = CountingTokenizer()
    chunks, _, rest = run(TextStream(tokenizer), tokens)
    assert tokenizer.num_decoded < 100 * len(tokens)
    whole = tokenizer.decode(tokens)
    assert whole.startswith("".join(chunks) + rest)
    assert len(whole) - 40 < len("".join(chunks)) < len(whole)


def test_pieces_add_up_whatever_bytes_and_ids_without_text_come_between_characters():
    rng = random.Random(5)
    for _ in range(300):
        tokens = []
        for _ in range(rng.randint(1, 6)):
            few = rng.randint(1, 60)
            tokens += rng.choice(
                [
                    [rng.randrange(128, 256) for _ in range(few)],
                    [rng.randrange(128, 256)] * few,
                    [300] * few,
                    list("你好 🔥ů".encode()) * rng.randint(1, 5),
                ]
            )
        tokens += b"end"
        chunks, _, rest = run(TextStream(ByteTokenizer()), tokens)
        assert "".join(chunks) + rest == ByteTokenizer().decode(tokens)
