"""A scheduler's state leaves it as plain data and goes on in another one, of another size."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler import Scheduler, SchedulerConfig, invariants
from scheduler.snapshot import export_state, restore_state
from tests.support.drive import Driver, HashModel, expected_tokens, request, samples


def oldest_sibling(seq):
    """As the engine names it: the sibling that a request was added with may have ended."""
    oldest = min(seq.siblings, key=lambda one: one.seq_id, default=seq)
    return None if oldest is seq else oldest.request.request_id


def moved(driver, **changes):
    """A new driver in the state of `driver`, whose plans in flight are lost; and its old ids."""
    config = SchedulerConfig(**{
        name: changes.get(name, getattr(driver.config, name))
        for name in driver.config.__dataclass_fields__
    })  # fmt: skip
    before = driver.scheduler
    state = export_state(before)
    new = Driver(config, num_priorities=driver.num_priorities)
    new.model = HashModel(config)
    live = sorted(before.sequences(), key=lambda seq: seq.seq_id)
    new.add(*(replace(seq.request, sibling_of=oldest_sibling(seq)) for seq in live))
    old_ids = dict(zip((seq.request.request_id for seq in live), live, strict=True))
    for seq_id, one in new.requests.items():
        new.outputs[seq_id] = list(old_ids[one.request_id].outputs)
    sources = restore_state(new.scheduler, state)
    size = config.block_size
    assert set(sources.values()) <= set(state.blocks())
    for block, source in sources.items():
        for name in ("_tokens", "_positions"):
            content = getattr(driver.model, name)[source * size : (source + 1) * size]
            getattr(new.model, name)[block * size : (block + 1) * size] = content
    invariants.check(new.scheduler)
    new.model.check_content(new.scheduler.blocks.pool.index)
    return new


def outcome(driver):
    return {one.request_id: driver.outputs[seq_id] for seq_id, one in driver.requests.items()}


CONFIG = SchedulerConfig(
    num_blocks=60, max_model_len=300, max_num_seqs=6, max_num_batched_tokens=64
)


@pytest.mark.parametrize("num_blocks", [60, 200, 30, 22])
@pytest.mark.parametrize("steps", [1, 2, 5, 9, 14, 23])
def test_requests_go_on_as_if_nothing_had_happened(num_blocks, steps):
    driver = Driver(CONFIG)
    rng = np.random.default_rng(steps)
    common = rng.integers(0, 900, 40).tolist()
    prompts = [common + rng.integers(0, 900, n).tolist() for n in (1, 8, 30)]
    prompts += [rng.integers(0, 900, n).tolist() for n in (3, 90, 150, 64, 17)]
    requests = [request(str(i), p, max_tokens=20) for i, p in enumerate(prompts)]
    driver.add(*requests)
    for _ in range(steps):
        driver.step()
    new = moved(driver, num_blocks=num_blocks)
    done = {name: tokens for name, tokens in outcome(driver).items()}
    while new.scheduler.has_unfinished():
        new.step()
    done |= outcome(new)
    for one in requests:
        wanted, _ = expected_tokens(one, new.scheduler.max_seq_len)
        assert done[one.request_id] == wanted


@pytest.mark.parametrize("seed", range(24))
def test_random_traces_may_move_again_and_again(seed):
    rng = np.random.default_rng(seed)
    options = dict(
        window=[None, 33][seed % 2],
        prefix_caching=seed % 3 > 0,
        contiguous_blocks=seed % 4 > 1,
        max_prefill_chunk=[None, 20][seed % 5 > 2],
        num_blocks=int(rng.integers(22, 70)),
    )
    driver = Driver(replace(CONFIG, **options), num_priorities=1 + seed % 7 // 2)
    asked, done = {}, {}
    for turn in range(8):
        for index in range(int(rng.integers(0, 4))):
            name, length = f"{turn}.{index}", int(rng.integers(1, 150))
            count, tokens = int(rng.integers(1, 4)), int(rng.integers(1, 30))
            new = samples(name, count, length, tokens)
            asked |= {one.request_id: one for one in new}
            driver.add(*new)
        for _ in range(int(rng.integers(1, 12))):
            driver.step()
        done |= outcome(driver)
        driver = moved(driver, num_blocks=int(rng.integers(22, 70)))
    while driver.scheduler.has_unfinished():
        driver.step()
    done |= outcome(driver)
    for name, one in asked.items():
        assert done[name] == expected_tokens(one, 300, options["window"])[0]


def test_in_a_smaller_pool_the_most_urgent_go_on_running():
    driver = Driver(CONFIG)
    driver.add(
        *(
            request(name, 100, max_tokens=50, priority=p)
            for name, p in zip("abcd", (2, 1, 3, 1), strict=True)
        )
    )
    for _ in range(12):
        driver.step()
    driver.add(request("e", 10, max_tokens=50))
    new = moved(driver, num_blocks=17)
    running = [s.request.request_id for s in new.scheduler.sequences() if s.blocks]
    assert running == ["b", "d"]
    assert {s.request_id for s in new.step().seqs} == {"b", "d", "e"}
    while new.scheduler.has_unfinished():
        new.step()
    wanted = {one.request_id: expected_tokens(one, 256)[0] for one in new.requests.values()}
    assert outcome(new) == wanted


def test_what_was_computed_is_not_computed_again():
    driver = Driver(CONFIG)
    driver.add(request("a", 100, max_tokens=50), request("b", 20, max_tokens=50))
    for _ in range(12):
        driver.step()
    new = moved(driver)
    plan = new.scheduler.schedule()
    assert plan.counts.tolist() == [1, 1]
    for seq in driver.scheduler.sequences():
        (again,) = (s for s in new.scheduler.sequences() if s.request == seq.request)
        assert again.num_known == seq.num_known


def test_the_cache_keeps_its_order_and_gives_up_the_least_recent_when_short():
    driver = Driver(CONFIG)
    for name in "abcd":
        driver.add(request(name, 80, max_tokens=1))
        while driver.scheduler.has_unfinished():
            driver.step()
    assert driver.scheduler.blocks.pool.num_cached == 20
    same, small = moved(driver), moved(driver, num_blocks=13)

    def hits(new, name):
        seq_id = new.add(request(name, 80, max_tokens=1))[0]
        while new.scheduler.has_unfinished():
            new.step()
        return new.last_updates[seq_id].num_cached_tokens

    assert [hits(same, name) for name in "abcd"] == [64] * 4
    assert [hits(moved(driver, num_blocks=13), name) for name in "ad"] == [0, 64]
    assert small.scheduler.blocks.pool.num_cached == 12


def test_a_chain_without_its_beginning_is_not_kept():
    """The end of a chain can be more recent than its beginning; alone it can not be found."""
    driver = Driver(CONFIG)
    driver.add(request("a", 80, max_tokens=1))
    while driver.scheduler.has_unfinished():
        driver.step()
    state = export_state(driver.scheduler)
    first = next(one for one in state.cached if one.parent == 0)
    state.cached.remove(first)
    scheduler = Scheduler(CONFIG)
    assert restore_state(scheduler, state) == {}
    assert scheduler.blocks.pool.num_cached == 0
    invariants.check(scheduler)
