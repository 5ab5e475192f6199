"""Results as strictly valid JSON, one line each."""

from __future__ import annotations

import json
import math
from typing import Any

from pagedjax.outputs import CompletionOutput, RequestOutput, TokenLogprobs


def json_line(index: int, result: RequestOutput) -> str:
    """One result as a line of JSON.

    The log-probability of an impossible token, minus infinity, is written as null: JSON has no
    infinities and no NaN.

    Args:
        index: position of the prompt among those given.
        result: a finished request.
    """
    times = result.timings
    record = {
        "index": index,
        "prompt": result.prompt,
        "error": result.error,
        "outputs": [_completion(output) for output in result.outputs],
        "prompt_logprobs": _logprobs(result.prompt_logprobs),
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": result.num_cached_tokens,
        "num_generated_tokens": result.num_generated_tokens,
        "seconds": {
            "queued": times.queued,
            "time_to_first_token": times.time_to_first_token,
            "total": times.total,
        },
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _completion(output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "logprobs": _logprobs(output.logprobs),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _logprobs(entries: tuple[TokenLogprobs | None, ...] | None) -> list[Any] | None:
    if entries is None:
        return None
    return [
        entry
        and {
            "token_id": entry.token_id,
            "logprob": _finite(entry.logprob),
            "top": [[token, _finite(logprob)] for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
