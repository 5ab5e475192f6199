"""Fast LLM inference for people who live in JAX.

Public names load on first use, so that `import pagedjax` is quick and parts that need less (the
conversion, the command line's help) load no engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.async_llm import AsyncLLM as AsyncLLM
    from pagedjax.config import EngineConfig as EngineConfig
    from pagedjax.llm import LLM as LLM
    from pagedjax.outputs import CompletionOutput as CompletionOutput
    from pagedjax.outputs import RequestOutput as RequestOutput
    from pagedjax.sampling_params import BeamSearchParams as BeamSearchParams
    from pagedjax.sampling_params import SamplingParams as SamplingParams

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "sampling_params",
    "BeamSearchParams": "sampling_params",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
}
__all__ = [  # noqa: F822  (loaded by __getattr__)
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "BeamSearchParams",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
