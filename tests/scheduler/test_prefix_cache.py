"""Blocks shared between sequences with a common prefix."""

import numpy as np
import pytest

from scheduler import BlockPool, Request, SchedulerConfig, prefix_index
from scheduler.prefix_index import ROOT, PrefixIndex
from tests.support.drive import Driver, expected_tokens, request

BOTH_LOOPS = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def make(num_blocks: int, pipelined: bool = True, **options: int | bool) -> Driver:
    """A driver whose pool has `num_blocks` blocks besides the null block."""
    sizes = {"num_blocks": num_blocks + 1, "max_model_len": 2048} | options
    return Driver(SchedulerConfig(**sizes), pipelined)


def serve(driver: Driver, *requests: Request) -> list[int]:
    """Serve requests to the end; how many prompt tokens of each were found in the cache."""
    seq_ids = driver.add(*requests)
    driver.run()
    driver.verify()
    return [driver.last_updates[seq_id].num_cached_tokens for seq_id in seq_ids]


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("length", "cached"),
    [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)],
)
def test_a_full_hit_still_computes_its_last_token(pipelined: bool, length: int, cached: int):
    """BM01: a prompt whose every block is cached has something left to compute."""
    driver = make(20, pipelined)
    free = driver.scheduler.num_free_blocks
    assert serve(driver, request("cold", tokens(10, length), 4)) == [0]
    num_plans = len(driver.plans)
    assert serve(driver, request("warm", tokens(10, length), 4)) == [cached]
    first = driver.plans[num_plans].seqs[0]
    assert (first.start, first.num_tokens, first.num_samples) == (cached, length - cached, 1)
    assert driver.outputs[0] == driver.outputs[1]
    assert driver.scheduler.num_free_blocks == free


def test_without_prefix_caching_nothing_is_shared():
    driver = make(20, prefix_caching=False)
    for name in "ab":
        assert serve(driver, request(name, tokens(0, 64), 3)) == [0]
    assert len(driver.scheduler.blocks.pool.index) == 0


@BOTH_LOOPS
def test_an_overwritten_block_is_no_longer_found(pipelined: bool):
    """BM03: prompts that take the blocks of X take them out of the index."""
    driver = make(4, pipelined)
    serve(driver, request("x", tokens(100, 32), 4))
    serve(driver, request("y", tokens(500, 60), 4))
    assert serve(driver, request("again", tokens(100, 32), 4)) == [0]


class CollidingBytes(bytes):
    """A key whose hash says nothing."""

    def __hash__(self) -> int:
        return 0


@BOTH_LOOPS
def test_colliding_hashes_share_nothing(pipelined: bool, monkeypatch: pytest.MonkeyPatch):
    """BM05: tokens and what came before them are compared, whatever the hash says."""
    key = prefix_index.block_key
    monkeypatch.setattr(prefix_index, "block_key", lambda *args: CollidingBytes(key(*args)))
    driver = make(40, pipelined)
    serve(driver, request("a", tokens(1, 33), 4), request("b", tokens(501, 33), 4))
    assert len(driver.scheduler.blocks.pool.index) == 4
    swapped = tokens(1, 16) + tokens(517, 17)  # the second block is known, after another first one
    assert serve(driver, request("c", swapped, 4)) == [16]
    assert serve(driver, request("d", tokens(1, 33), 4)) == [32]


@BOTH_LOOPS
def test_an_incomplete_block_is_never_offered(pipelined: bool):
    """BM08: the 4 tokens behind the first block are not taken for a block."""
    driver = make(40, pipelined)
    p = tokens(0, 20)
    assert serve(driver, request("p", p, 1)) == [0]
    assert serve(driver, request("q", p + tokens(300, 12), 1)) == [16]
    assert serve(driver, request("p2", p, 1)) == [16]
    assert serve(driver, request("q2", p + tokens(300, 13), 1)) == [32]


@BOTH_LOOPS
def test_eviction_leaves_blocks_that_a_live_sequence_reads(pipelined: bool):
    """BM11: A ends, B goes on reading their common prefix while a third needs blocks."""
    driver = make(6, pipelined)
    prefix = tokens(0, 32)
    a, b = request("a", prefix + [900], 2), request("b", prefix + [901], 20)
    driver.add(a)
    driver.step()
    driver.step()
    driver.add(b, request("pressure", tokens(400, 48), 4))
    while driver.scheduler.has_unfinished():
        driver.step()
    driver.verify()
    assert driver.last_updates[1].num_cached_tokens == 32
    assert driver.outputs[1] == expected_tokens(b, 96)[0]


def chain(pool: BlockPool, content: np.ndarray) -> list[int]:
    """Blocks that hold `content`, as their owner leaves them behind."""
    blocks = pool.take(len(content) // 16)
    pool.index.add(blocks, ROOT, content.tobytes())
    pool.release(reversed(blocks))
    return blocks


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    """BM14: of three cached blocks the third goes first, the same on every repeat."""
    content = np.arange(48, dtype=np.int32)
    for _ in range(50):
        pool = BlockPool(4, block_size=16)
        blocks = chain(pool, content)
        assert pool.take(1) == blocks[2:]
        assert pool.index.find(content.tobytes()) == blocks[:2]


@BOTH_LOOPS
def test_the_tail_of_a_finished_sequence_is_evicted_before_its_head(pipelined: bool):
    """BM14: the same for a sequence that ended."""
    driver = make(4, pipelined)
    p = tokens(0, 48)
    serve(driver, request("p", p, 2))
    serve(driver, request("other", tokens(500, 17), 1))  # one blank block, one evicted
    assert serve(driver, request("again", p + [1], 2)) == [32]


@BOTH_LOOPS
def test_a_prefix_in_use_again_and_again_stays(pipelined: bool):
    """BM16: least recently *used* goes first, not least recently made."""
    driver = make(6, pipelined)
    hot = tokens(0, 17)
    serve(driver, request("hot", hot, 1))
    for index in range(20):
        assert serve(driver, request(f"hot{index}", hot, 1)) == [16]
        serve(driver, request(f"cold{index}", 30, 1))


@BOTH_LOOPS
def test_hits_are_pinned_before_blocks_are_taken(pipelined: bool):
    """BM17: the hits are the oldest free blocks, and the same request needs new ones."""
    driver = make(4, pipelined)
    a = tokens(0, 32)
    serve(driver, request("a", a, 1), request("b", tokens(500, 31), 1))
    assert serve(driver, request("c", a + tokens(800, 31), 1)) == [32]
    table = driver.plans[-1].block_tables[0].tolist()
    assert sorted(table) == [1, 2, 3, 4]


def test_a_request_that_is_not_admitted_changes_nothing():
    driver = make(6)
    serve(driver, request("a", tokens(0, 33), 1))
    driver.add(request("busy", 60, 20))
    driver.step()
    before = driver.scheduler.blocks.pool.free_blocks()
    driver.add(request("big", tokens(0, 33) + tokens(600, 30), 1))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    assert driver.scheduler.blocks.pool.free_blocks() == before
    driver.run()
    driver.verify()


@BOTH_LOOPS
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_an_abort_leaves_only_full_computed_blocks(pipelined: bool, chunks: int):
    """BM19: after each chunk of 32 tokens of a prompt of 100."""
    driver = make(12, pipelined, max_prefill_chunk=32)
    prompt = tokens(0, 100)
    driver.add(request("a", prompt, 5))
    for _ in range(chunks):
        driver.step()
    driver.finish("a")
    assert driver.scheduler.num_free_blocks == 12
    driver.run()
    assert serve(driver, request("again", prompt, 5)) == [min(32 * chunks, 96)]


@BOTH_LOOPS
def test_twins_in_one_step_share_nothing_and_later_ones_everything(pipelined: bool):
    """BM24: what a step computes can be shared from the next step on."""
    driver = make(40, pipelined)
    p = tokens(0, 40)
    assert serve(driver, request("p1", p, 8), request("p2", p, 8)) == [0, 0]
    assert serve(driver, request("p3", p[:32] + tokens(700, 9), 9)) == [32]
    assert len(driver.scheduler.blocks.pool.index) == 3  # two of p, once, and one of p3's own


@BOTH_LOOPS
def test_a_prefix_can_be_shared_while_its_owner_runs(pipelined: bool):
    driver = make(40, pipelined)
    driver.add(request("a", tokens(0, 40), 30))
    driver.step()
    driver.step()
    (b,) = driver.add(request("b", tokens(0, 40), 5))
    driver.run()
    driver.verify()
    assert driver.last_updates[b].num_cached_tokens == 32
    assert driver.end_order == ["b", "a"]


@BOTH_LOOPS
def test_generated_tokens_are_cached_too(pipelined: bool):
    """A second turn finds the first turn's prompt and answer."""
    driver = make(40, pipelined)
    serve(driver, request("turn1", tokens(0, 20), 50))
    history = tokens(0, 20) + driver.outputs[0]
    assert serve(driver, request("turn2", history + [1, 2, 3], 5)) == [64]


@pytest.mark.parametrize("length", range(29, 34))
@pytest.mark.parametrize("max_tokens", range(1, 5))
def test_a_block_with_a_token_that_is_not_known_yet_is_not_offered(length: int, max_tokens: int):
    """The end by length frees the blocks one step before the host knows what is in them."""
    driver = make(40)
    serve(driver, request("a", tokens(0, length), max_tokens))
    for content in driver.scheduler.blocks.pool.index.contents().values():
        block = np.frombuffer(content, np.int32).tolist()
        known = tokens(0, length) + driver.outputs[0]
        assert block in (known[:16], known[16:32])


@BOTH_LOOPS
def test_a_preempted_sequence_finds_its_own_blocks_again(pipelined: bool):
    """SC09: what is left to compute is counted after the hit is known."""
    driver = make(7, pipelined)
    driver.add(request("old", 54, 20), request("young", 30, 40))
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions > 0
    young = [s for plan in driver.plans for s in plan.seqs if s.request_id == "young"]
    resumed = [s for s in young[1:] if s.num_tokens > 1]
    assert resumed and all(s.start >= 16 and s.num_samples == 1 for s in resumed)
    assert driver.last_updates[1].num_cached_tokens == 0  # of the prompt, when it first came


@BOTH_LOOPS
@pytest.mark.parametrize("steps", range(5))
def test_a_reset_forgets_what_running_sequences_computed_before_it(pipelined: bool, steps: int):
    """BM26: with new weights no old keys and values are found, however far a sequence had come."""
    driver = make(40, pipelined, max_prefill_chunk=32)
    prompt = tokens(0, 100)
    driver.add(request("a", prompt, 40), request("b", prompt, 40))
    for _ in range(steps):
        driver.step()
    driver.scheduler.reset_prefix_cache()
    started = [seq for seq in driver.scheduler.sequences() if seq.blocks]
    driver.run()
    driver.verify()
    assert serve(driver, request("after", prompt, 4)) == [0 if started else 96]
    assert serve(driver, request("warm", prompt, 4)) == [96]


@BOTH_LOOPS
def test_prompt_logprobs_compute_the_whole_prompt(pipelined: bool):
    driver = make(40, pipelined)
    serve(driver, request("a", tokens(0, 50), 4))
    assert serve(driver, request("b", tokens(0, 50), 4, prompt_logprobs=True)) == [0]
    assert sum(p.num_samples for p in driver.plans[4:]) == 50 + 3
    assert serve(driver, request("c", tokens(0, 50), 4)) == [48]


def test_a_block_behind_an_evicted_one_is_not_found_again():
    """Numbers of content are never used twice, so an orphan stays out of reach."""
    index = PrefixIndex(10, block_size=16)
    first, second, other = (np.full(16, value, np.int32).tobytes() for value in (1, 2, 3))
    index.add([5, 7], ROOT, first + second)
    index.discard(5)
    index.add([5], ROOT, other)
    assert index.find(other + second) == [5]
    index.add([6], ROOT, first)
    assert index.find(first + second) == [6]


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        ((("adapter", "x"),), (("cache_salt", "x"),), 0),
        ((("adapter", "x"),), (("adapter", "y"),), 0),
        ((("adapter", "x"),), (), 0),
        ((("a", "b, c"),), (("a, b", "c"),), 0),
        ((("a", "x"), ("b", "y")), (("b", "y"), ("a", "x")), 32),
    ],
)
def test_prefixes_are_shared_between_equal_salts_alone(
    first: tuple[tuple[str, str], ...], second: tuple[tuple[str, str], ...], cached: int
):
    """BM07: a value means something else in another field."""
    driver = make(20)
    assert serve(driver, request("a", tokens(0, 33), 3, cache_salt=first)) == [0]
    assert serve(driver, request("b", tokens(0, 33), 3, cache_salt=second)) == [cached]
    assert serve(driver, request("c", tokens(0, 33), 3, cache_salt=first)) == [32]


def test_a_block_whose_prefix_was_evicted_is_found_again_under_the_new_one():
    """A sibling indexes blocks that another one had indexed behind content that is gone."""
    index = PrefixIndex(10, 16)
    parts = [np.arange(16 * i, 16 * i + 16, dtype=np.int32).tobytes() for i in range(2)]
    number = index.add([1], ROOT, parts[0])
    index.add([2], number, parts[1])
    index.discard(1)
    assert index.find(b"".join(parts)) == []
    index.add([3, 2], ROOT, b"".join(parts))
    assert index.find(b"".join(parts)) == [3, 2]
    index.discard(2)
    assert index.find(b"".join(parts)) == [3] and len(index) == 1
