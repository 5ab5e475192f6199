"""The real model: SmolLM2-135M-Instruct from its package, converted once into the user's cache."""

import functools

from pagedjax.demo import demo_model
from pagedjax.loading import LoadedModel, load_model
from pagedjax.tokenizer import Tokenizer


@functools.cache
def smollm2_path():
    return demo_model(lambda message: None)


@functools.cache
def smollm2() -> LoadedModel:
    return load_model(smollm2_path(), dtype="float32")


@functools.cache
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer(smollm2_path() / "tokenizer")
