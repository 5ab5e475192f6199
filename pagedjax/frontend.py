"""What `LLM` and `AsyncLLM` share: starting an engine, and reading a caller's prompts."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from pagedjax.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine
    from pagedjax.loading import LoadedModel
    from pagedjax.metrics import MetricsServer

Prompt = str | Sequence[int]
MAX_PORT = 65535
_BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but no token ids


def start_engine(model: str | Path, *, progress: bool, **options: Any) -> Engine:
    """An engine for the checkpoint at `model`.

    Args:
        model: directory of a native checkpoint or of an unconverted Hugging Face one.
        progress: show a bar on standard error while steps are compiled.
        **options: fields of `EngineConfig`.

    Raises:
        ValueError: an option or the checkpoint is not usable.
    """
    # Imported here so that reading prompts and parameters does not need JAX.
    from tqdm import tqdm

    from pagedjax.config import EngineConfig
    from pagedjax.engine.engine import Engine
    from pagedjax.loading import load_model

    config = EngineConfig(**options)
    loaded = of_one_dtype(load_model(model, dtype=weights_dtype(config.dtype)))
    tokenizer = None if loaded.tokenizer_dir is None else Tokenizer(loaded.tokenizer_dir)
    with tqdm(desc="compiling", unit="step", disable=not progress, leave=False) as bar:
        return Engine(loaded, tokenizer, config, partial(_show, bar))


def check_port(port: Any) -> None:
    """Refuse what is no port, before anything is started that would serve there.

    Args:
        port: 0 means any that is free, None means none at all.

    Raises:
        ValueError: it is something else than that or an integer up to 65535.
    """
    if port is not None and not (_is_integer(port) and 0 <= port <= MAX_PORT):
        raise ValueError(f"a port is an integer from 0 to {MAX_PORT}, or None; got {port!r}")


def serve_metrics(engine: Engine, port: int | None, host: str) -> MetricsServer | None:
    """A server of the engine's metrics, or None without a port.

    Raises:
        ValueError: the port is none.
        OSError: the port is taken.
    """
    check_port(port)
    if port is None:
        return None
    from pagedjax.metrics import MetricsServer

    return MetricsServer(engine, port, host)


def resize_pool(engine: Engine, metrics: MetricsServer | None, num_blocks: int) -> None:
    """`Engine.resize_pool`, seen by the metrics at once: an idle engine takes no step for them."""
    engine.resize_pool(num_blocks)
    if metrics is not None:
        metrics.look()


def weights_dtype(dtype: str) -> str | None:
    """What to load weights as; None is what the checkpoint stores.

    "auto" means float32 on a CPU, where narrower arithmetic is emulated and slow.
    """
    import jax

    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else None


def of_one_dtype(model: LoadedModel) -> LoadedModel:
    """`model` with all parameters in the dtype of its embedding, since a step computes in one.

    Checkpoints, GGUF files above all, often keep norms in float32 beside narrower matrices.
    """
    dtype = model.params["embed.table"].dtype
    params = {name: array.astype(dtype) for name, array in model.params.items()}
    return dataclasses.replace(model, params=params)


@dataclass(frozen=True, slots=True)
class Frontend:
    """Reads what callers hand in, for one engine.

    Attributes:
        engine: runs the requests; its tokenizer is None if the checkpoint brings none, and
            prompts must then be token ids.
    """

    engine: Engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None."""
        return self.engine.tokenizer

    def tokens(self, prompt: Any) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its token ids.

        Raises:
            ValueError: it is neither text nor a sequence of integers, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this checkpoint has no tokenizer; give the prompt as token ids")
            return prompt, self.tokenizer.encode(prompt)
        items = _as_list(prompt)
        is_list = isinstance(items, Sequence) and not isinstance(items, _BYTES)
        if not is_list or not all(map(_is_integer, items)):
            raise ValueError(f"a prompt is text or a list of token ids, got {_brief(prompt)}")
        return None, [int(item) for item in items]

    def chat_tokens(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """A conversation as the template renders it, and its token ids.

        Raises:
            ValueError: there is no tokenizer or template, or the conversation is malformed.
        """
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer, so it cannot chat")
        text = self.tokenizer.render_chat(messages)
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def params(self, params: SamplingParams | None) -> SamplingParams:
        """`params`, or the checkpoint's own settings if there are none.

        Raises:
            ValueError: it is something else.
        """
        if params is None:
            return SamplingParams.from_generation(self.engine.generation)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"wanted SamplingParams, got {type(params).__name__}")
        return params

    @staticmethod
    def beam_params(params: BeamSearchParams) -> BeamSearchParams:
        """The same `params`.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"wanted BeamSearchParams, got {type(params).__name__}")
        return params


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list of prompts.

    A list of integers is one prompt of token ids, an empty list no prompt at all.

    Raises:
        ValueError: `prompts` is neither text nor a sequence.
    """
    prompts = _as_list(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
        raise ValueError(f"prompts are text, token ids, or a list of them; got {_brief(prompts)}")
    if prompts and all(map(_is_integer, prompts)):
        return [prompts]
    return list(prompts)


def priority_list(priority: Any, count: int) -> list[int]:
    """One priority for each of `count` prompts, from one for all or one for each.

    Raises:
        ValueError: something is no integer, or their number is another.
    """
    priority = _as_list(priority)
    items = list(priority) if isinstance(priority, Sequence) else [priority] * count
    if len(items) != count or not all(map(_is_integer, items)):
        raise ValueError(
            f"priority is an integer, or one for each of {count} prompts; got {_brief(priority)}"
        )
    return [int(item) for item in items]


def conversation_list(messages: Any) -> list[Any]:
    """One conversation (a list of messages), or several, as a list of conversations.

    Raises:
        ValueError: `messages` is not a list.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"a conversation is a list of messages, got {_brief(messages)}")
    is_one = bool(messages) and all(hasattr(message, "keys") for message in messages)
    return [messages] if is_one else list(messages)


def _show(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _as_list(items: Any) -> Any:
    """Arrays of numpy and JAX as nested lists; everything else as it is."""
    is_array = hasattr(items, "tolist") and not isinstance(items, memoryview)
    return items.tolist() if is_array else items


def _is_integer(item: object) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)


def _brief(item: object) -> str:
    text = repr(item)
    return text if len(text) <= 80 else f"{text[:77]}..."
