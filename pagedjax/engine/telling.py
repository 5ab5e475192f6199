"""What a step has brought, told to its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedjax.engine.in_flight import Done
from pagedjax.engine.requests import Completion, LiveRequest

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine


def tell(engine: Engine, done: Done) -> None:
    """Tell the requests of a step what it has brought, and end those that it ends.

    Of most requests nobody waits for the single token: it joins those before it, and that is all.

    Args:
        engine: whose requests they are.
        done: a step that the scheduler has been told of.
    """
    step, samples, update = done.step, done.samples, done.update
    for target in step.targets:
        live, num_top = target.request, target.request.params.prompt_logprobs
        if engine._live.get(live.request_id) is live and num_top is not None:
            live.tell_prompt(samples.logprobs_at(target.row, target.token_id, num_top))
            if live.is_streamed:
                engine._note(live)
    members, ends = step.members.pairs, update.ends
    for index, token in zip(update.indices, update.token_ids, strict=True):
        live, completion = members[index]
        completion.token_ids.append(token)
        if not live.is_quiet or index in ends:
            _look_at(engine, live, completion, index, done)
    engine._generated_tokens += len(update.indices)
    for index in update.beams:
        _tell_beam(engine, *members[index], index, done)


def _look_at(
    engine: Engine, live: LiveRequest, completion: Completion, index: int, done: Done
) -> None:
    """See to a completion's newest token, which may be its first or its last."""
    live.begin(done.time, done.update.num_cached_tokens[index])
    end = done.update.ends.get(index)
    if end is not None:
        completion.end(end.reason.value, end.stop_token_id)
    if live.params.logprobs is not None:
        row, token = done.row(index), completion.token_ids[-1]
        completion.logprobs.append(done.samples.logprobs_at(row, token, live.params.logprobs))
    if live.params.stop:
        completion.speak()
        if end is None and completion.finish_reason is not None:
            engine._scheduler.finish(completion.key)
    if completion.finish_reason is not None:
        engine._end(live, completion)
    if live.is_streamed or live.has_ended:
        engine._note(live)


def _tell_beam(engine: Engine, live: LiveRequest, beam: Completion, index: int, done: Done) -> None:
    """Let a search know how a beam can go on; it does, or ends, once all have been heard."""
    live.begin(done.time, done.update.num_cached_tokens[index])
    search, samples, row = live.beams, done.samples, done.row(index)
    assert search and samples.top_ids is not None and samples.top_logprobs is not None
    if not search.report(beam.key, samples.top_ids[row], samples.top_logprobs[row]):
        return
    choices = search.advance()
    if choices:
        engine._scheduler.choose_beams(choices)
        return
    for completion, result in zip(live.completions, search.results, strict=True):
        engine._scheduler.finish(completion.key)
        engine._end(live, completion)
        completion.tell_result(result, search.is_stopped(result))
        engine._generated_tokens += len(result.token_ids)
    engine._note(live)
