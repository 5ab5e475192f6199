"""Requests go on in a pool of another size."""

import pytest

from tests.engine.test_snapshot import GREEDY, add_all, continued, run, uninterrupted, whole
from tests.support.tiny_engines import drain, random_prompts, tiny_engine


@pytest.mark.parametrize("num_blocks", [16, 60, 400])
def test_a_pool_of_another_size_changes_no_token(num_blocks):
    wanted = uninterrupted()
    engine = tiny_engine()
    add_all(engine)
    before = run(engine, 6)
    engine.resize_pool(num_blocks)
    assert engine.stats().blocks_total == num_blocks - 1
    assert engine.kv_spec.num_blocks == engine.config.num_blocks == num_blocks
    found = whole(before, continued(engine))
    for request_id, (completions, _) in wanted.items():
        tokens = [token_ids for token_ids, _ in found[request_id][0]]
        assert tokens == [token_ids for token_ids, _ in completions]


def test_a_pool_too_small_for_a_request_is_refused_and_nothing_changes():
    engine = tiny_engine()
    add_all(engine)
    before = run(engine, 14)
    with pytest.raises(ValueError, match=r"has \d+ tokens, a pool of 5 blocks holds 64"):
        engine.resize_pool(5)
    assert whole(before, continued(engine)) == uninterrupted()


def test_a_pool_that_shrinks_stores_nothing_before_its_content_is_there():
    """Otherwise host memory would hold one sequence's keys under the name of another's."""
    engine = tiny_engine(num_blocks=64, max_model_len=256, host_cache_bytes=1 << 20)
    for number, prompt in enumerate(random_prompts([200, 200], seed=4)):
        engine.add_request(str(number), None, prompt, GREEDY)
    run(engine, 20)
    engine.resize_pool(20)
    tiers = engine._scheduler.blocks.tiers
    assert tiers is not None and not len(tiers.take().stores)


def test_a_resized_engine_that_was_warm_compiles_nothing_later():
    engine = tiny_engine(warm_up=True, max_num_seqs=2, max_num_batched_tokens=16)
    engine.add_request("a", None, random_prompts([30])[0], GREEDY)
    run(engine, 3)
    engine.resize_pool(40)
    drain(engine)
    assert engine.stats().compiles_after_warmup == 0
