"""Ctrl-C, and prompts that look like others, through `LLM`."""

import signal

import pytest

from pagedjax.engine.logprobs import HostSamples
from pagedjax.frontend import Frontend, prompt_list
from pagedjax.llm import LLM
from pagedjax.sampling_params import SamplingParams
from pagedjax.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine
from tests.support.tiny_engines import plain_greedy, random_prompts, tiny_engine, tiny_model
from tests.support.tiny_tokenizers import save_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(autouse=True)
def default_handler():
    """Python's own, which a process that a shell starts in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("reads", [1, 2, 5])
def test_ctrl_c_in_a_step_ends_one_call_and_the_engine_goes_on(monkeypatch, reads):
    """In the middle of reading tokens, where nearly all interrupts come."""
    llm = LLM.from_engine(tiny_engine())
    prompt, other = random_prompts([9, 20], seed=1)
    beside = llm.stream(other, GREEDY)
    parts = [next(beside)]
    read, left = HostSamples.read, [reads]

    def interrupted_read(outputs):
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGINT)
        return read(outputs)

    monkeypatch.setattr(HostSamples, "read", interrupted_read)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, GREEDY, progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (again,) = llm.generate(prompt, GREEDY, progress=False)
    assert again.outputs[0].token_ids == plain_greedy(tiny_model(), prompt, 12)
    parts += beside
    tokens = tuple(t for _, delta in parts for t in delta.outputs[0].token_ids)
    assert tokens == plain_greedy(tiny_model(), other, 12)


def test_a_handler_of_the_surrounding_program_is_left_alone():
    engine, seen = EchoEngine(), []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(engine.steps))
    step = engine.step
    engine.step = lambda: signal.raise_signal(signal.SIGINT) or step()
    try:
        LLM.from_engine(engine).generate("ab", SamplingParams(max_tokens=3), progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [0, 1, 2]


def test_bytes_are_no_prompt():
    """They are a sequence of integers, too, but nobody means those."""
    with pytest.raises(ValueError, match="b'abc'"):
        Frontend(EchoEngine()).tokens(b"abc")
    with pytest.raises(ValueError, match="b'abc'"):
        prompt_list(b"abc")


@pytest.mark.parametrize("content", [5, 1.5, ["a"], {"text": "a"}])
def test_a_conversation_that_breaks_the_template_fails_alone(tmp_path, content):
    """SC20: `+` in a template raises TypeError where the content is no text."""
    template = "{% for m in messages %}{{ '<|turn|>' + m.content }}{% endfor %}"
    engine = EchoEngine()

    engine.tokenizer = Tokenizer(save_tokenizer(tmp_path / "tokenizer", template=template))
    llm = LLM.from_engine(engine)
    conversations = [[{"role": "user", "content": c}] for c in ("fine", content, "fine")]
    results = llm.chat(conversations, SamplingParams(max_tokens=2), progress=False)
    assert [result.error is None for result in results] == [True, False, True]
    assert "template refuses" in results[1].error
