"""Prometheus metrics of an engine, and the terminal view that reads them."""

import asyncio
import dataclasses
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from pagedjax.async_llm import AsyncLLM
from pagedjax.cli import app
from pagedjax.cli.top import SHADES, block_map, metrics_url, read_samples, short
from pagedjax.engine.disk_tier import file_bytes
from pagedjax.llm import LLM
from pagedjax.metrics import COUNTERS, GAUGES, NAMESPACE, REGIONS, EngineMetrics, MetricsServer
from pagedjax.sampling_params import SamplingParams
from tests.support.echo_engine import EchoEngine
from tests.support.tiny_engines import random_prompts, settle, tiny_engine


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers.get_content_type() == "text/plain"
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name.removeprefix(f"{NAMESPACE}_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def top(*arguments):
    return CliRunner().invoke(app, ["top", *map(str, arguments)])


@pytest.fixture(scope="module")
def served():
    """A small engine that has preempted, shared and evicted, and its server."""
    engine = tiny_engine(num_blocks=12, max_num_seqs=4)
    llm = LLM.from_engine(engine, metrics_port=0)
    before = scrape(llm.metrics.port)
    prompts = random_prompts([40, 30, 20, 50])
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for _ in range(2):
        llm.generate([*prompts, prompts[0]], params, progress=False)
    yield engine, before, scrape(llm.metrics.port), llm.metrics.port
    llm.close()


def test_metrics_are_the_engines_own_figures(served):
    engine, before, after, _ = served
    stats, blocks = engine.stats(), engine.block_map()
    assert before["steps_total",] == 0 and after["steps_total",] == stats.steps > 0
    assert after["generated_tokens_total",] == stats.generated_tokens == 2 * 5 * 30
    assert after["preemptions_total", "recompute"] == stats.preemptions > 0
    assert after["prefix_evictions_total",] == stats.evictions > 0
    assert after["prefix_lookup_tokens_total",] == 2 * (40 + 30 + 20 + 50 + 40)
    assert 0 < after["prefix_hit_tokens_total",] == stats.prefix_hit_tokens
    assert after["prefix_hit_ratio", "pool"] == stats.prefix_hit_rate > 0
    assert after["prefix_hit_ratio", "host"] == after["prefix_hit_ratio", "disk"] == 0
    assert after["running_sequences",] == after["waiting_sequences",] == 0
    states = {state: after["kv_blocks", state] for state in ("used", "cached", "blank")}
    assert states["used"] == 0 and states["cached"] == blocks.cached.sum() > 0
    assert sum(states.values()) == stats.blocks_total == 11
    assert after["kv_external_fragmentation_ratio",] == blocks.external_fragmentation
    assert after["kv_pool_bytes",] == 12 * engine.kv_spec.block_bytes
    assert 0 < after["kv_peak_utilisation_ratio",] <= 1


def test_what_lies_below_the_pool_is_in_the_metrics(tmp_path):
    engine = tiny_engine(
        num_blocks=14,
        host_cache_bytes=6 * 4096,
        disk_cache_path=tmp_path,
        disk_cache_bytes=16 * file_bytes(4096, 16),
        preemption="recompute",
    )
    llm = LLM.from_engine(engine, metrics_port=0)
    prompts = random_prompts([100, 110, 100, 90])
    params = SamplingParams(temperature=0.0, max_tokens=8)
    for prompt in [*prompts, *prompts, *reversed(prompts)]:
        settle(engine)  # before, since what a step outside the calls finds is not shown yet
        llm.generate([prompt], params, progress=False)
    found, stats = scrape(llm.metrics.port), engine.stats()
    shown = " ".join(top(llm.metrics.port, "--count", "1").stdout.split())  # it may be wrapped
    llm.close()
    engine._lower.close()
    lower, counts = stats.lower, stats.lower.counts
    blocks = {tier: found["kv_lower_tier_blocks", tier] for tier in ("host", "disk")}
    assert blocks == {"host": lower.host_blocks_used, "disk": lower.disk_blocks_used}
    assert blocks["host"] == 6 and blocks["disk"] == 16
    assert found["kv_lower_tier_evictions_total", "host"] == counts.host_evictions > 0
    assert found["kv_lower_tier_evictions_total", "disk"] == counts.disk_evictions > 0
    for path, moved in stats.moved_bytes.items():
        assert found["kv_moved_bytes_total", path] == moved
        assert not moved or f"{short(moved)} {path.replace('_', ' ')}" in shown
    for tier, rate in stats.hit_rates.items():
        assert found["prefix_hit_ratio", tier] == rate
        assert not rate or f"{rate:.1%} {tier}" in shown
    assert stats.hit_rates["host"] > 0
    assert "6 host, 16 disk" in shown


def test_every_metric_has_help_and_a_name_by_the_rules(served):
    *_, port = served
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    for kind, entries in (("gauge", GAUGES), ("counter", COUNTERS)):
        for entry in entries:
            family = families[f"{NAMESPACE}_{entry.name}"]
            assert (family.type, family.documentation) == (kind, entry.help)
            assert family.samples
    assert len(families) == len(GAUGES) + len(COUNTERS)


def test_internal_fragmentation_is_seen_while_sequences_run():
    engine = tiny_engine()
    metrics = EngineMetrics(engine)
    engine.add_request("a", None, random_prompts([17])[0], SamplingParams(max_tokens=8))
    engine.step()
    metrics._due = 0.0
    metrics.look()
    found = {family.name: family.samples for family in metrics.collect()}
    (sample,) = found[f"{NAMESPACE}_kv_internal_fragmentation_ratio"]
    assert sample.value == pytest.approx(15 / 32)


def test_readings_are_taken_when_due_or_idle_and_never_by_a_scrape():
    engine = EchoEngine()
    metrics = EngineMetrics(engine)
    engine.add_request("a", None, [1, 2, 3], SamplingParams(max_tokens=3))

    def steps_seen():
        (family,) = (f for f in metrics.collect() if f.name == f"{NAMESPACE}_steps")
        return family.samples[0].value

    engine.step()
    metrics.look()
    assert steps_seen() == 0  # too early
    engine.step()
    metrics._due = 0.0
    metrics.look()
    assert steps_seen() == 2
    engine.step()
    metrics.look()
    assert steps_seen() == 3  # idle


def test_engines_have_registries_of_their_own():
    first, second = (MetricsServer(EchoEngine(), 0) for _ in range(2))
    try:
        assert first.port != second.port
        assert scrape(first.port).keys() == scrape(second.port).keys()
        assert not any(family.name.startswith(NAMESPACE) for family in REGISTRY.collect())
        with pytest.raises(OSError, match=f"cannot serve metrics at 127.0.0.1:{first.port}: "):
            MetricsServer(EchoEngine(), first.port)
    finally:
        first.close()
        second.close()
    with pytest.raises(urllib.error.URLError):
        scrape(first.port)


def test_a_pool_of_another_size_is_seen_before_the_next_step():
    def blocks(port):
        samples = scrape(port)
        return sum(samples["kv_blocks", state] for state in ("used", "cached", "blank"))

    llm = LLM.from_engine(tiny_engine(num_blocks=12), metrics_port=0)
    assert blocks(llm.metrics.port) == 11
    llm.resize_pool(20)
    assert blocks(llm.metrics.port) == llm.engine.stats().blocks_total == 19
    llm.close()

    async def run():
        async with AsyncLLM.from_engine(tiny_engine(num_blocks=12), metrics_port=0) as served:
            await served.resize_pool(30)
            return blocks(served.metrics.port)

    assert asyncio.run(run()) == 29


def test_an_async_engine_serves_metrics_until_it_is_closed():
    async def run():
        async with AsyncLLM.from_engine(EchoEngine(), metrics_port=0) as llm:
            async for _ in llm.generate("abc", SamplingParams(max_tokens=5)):
                pass
            found = await asyncio.to_thread(scrape, llm.metrics.port)
            return llm.metrics.port, found, await llm.stats()

    port, found, stats = asyncio.run(run())
    assert found["steps_total",] == stats.steps == 5
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_top_shows_the_figures_and_a_map_of_the_blocks(served):
    engine, *_, port = served
    shown = top(port, "--interval", "0.1", "--count", "2")
    assert shown.exit_code == 0, shown.output
    stats = engine.stats()
    assert shown.stdout.count("KV blocks") == 2
    assert f"0 used  {stats.blocks_cached} cached" in shown.stdout
    assert f"{stats.preemptions} recompute" in shown.stdout
    assert f"{stats.prefix_hit_rate:.1%} pool" in shown.stdout
    assert "0.0/s" in shown.stdout
    picture = block_map(read_samples(metrics_url(str(port)))).plain
    assert len(picture) == 11  # one character per block, of so few
    assert picture.count(SHADES[-1]) == stats.blocks_cached


def test_the_block_map_shows_a_single_block_of_a_large_region():
    samples = {}
    for index in range(REGIONS):
        samples["kv_region_used_ratio", f"{index:03d}"] = 1e-3 if index == 70 else 0.0
        samples["kv_region_cached_ratio", f"{index:03d}"] = 0.0
    rows = block_map(samples).plain.split("\n")
    assert [len(row) for row in rows] == [64] * 4
    assert rows[1][70 - 64] == SHADES[1]
    assert "".join(rows).count("·") == REGIONS - 1


def test_top_says_what_is_wrong_with_an_address():
    server = MetricsServer(EchoEngine(), 0)
    server.close()
    gone = top(server.port)
    where = f"http://127.0.0.1:{server.port}/metrics"
    assert gone.exit_code == 1
    assert gone.stderr.startswith(f"error: nothing answers at {where}: ")
    for address in ("0", server.port + 65536, "localhost:x", "ftp://localhost/"):
        nowhere = top(address)
        assert nowhere.exit_code == 2, address
        assert str(address) in nowhere.stderr and "is no address of metrics" in nowhere.stderr
    other, thread = start_http_server(0, addr="127.0.0.1", registry=CollectorRegistry())
    try:
        strange = top(f"127.0.0.1:{other.server_port}")
    finally:
        other.shutdown()
        other.server_close()
        thread.join()
    assert strange.exit_code == 2 and "no metrics of an engine" in strange.stderr


def test_top_says_so_where_something_else_than_a_web_server_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 not a web server\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        shown = top(port)
        thread.join()
    assert shown.exit_code == 2
    assert f"127.0.0.1:{port}/metrics shows no metrics of an engine" in shown.stderr


@pytest.mark.parametrize("port", [99999, -1, "9400", 1.0, True])
def test_what_is_no_port_is_refused_before_the_engine_starts(monkeypatch, port):
    monkeypatch.setattr("pagedjax.llm.start_engine", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr("pagedjax.async_llm.start_engine", lambda *_, **__: pytest.fail("started"))
    for make in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=f"from 0 to 65535, or None; got {port!r}"):
            make("MODEL", metrics_port=port)
        with pytest.raises(ValueError, match="a port is an integer"):
            make.from_engine(EchoEngine(), metrics_port=port)


@pytest.mark.parametrize("command", [("generate", "MODEL", "x"), ("chat", "MODEL")])
def test_the_command_line_refuses_a_port_when_it_is_read(monkeypatch, command):
    monkeypatch.setattr("pagedjax.llm.LLM", lambda *_, **__: pytest.fail("started"))
    done = CliRunner().invoke(app, [*command, "--metrics-port", "99999"])
    assert done.exit_code == 2 and "65535" in done.stderr


def test_numbers_are_short():
    assert [short(x) for x in (0, 7, 999, 1000, 12_345_678, 2**50)] == [
        "0", "7", "999", "1k", "12.3M", "1P"
    ]  # fmt: skip


def test_a_copy_of_the_figures_keeps_its_shares():
    stats = dataclasses.replace(
        EchoEngine().stats(), prefix_lookup_tokens=8, prefix_hit_tokens=2, blocks_used=1
    )
    assert (stats.prefix_hit_rate, stats.block_utilisation) == (0.25, 1.0)
    assert EchoEngine().stats().prefix_hit_rate == 0.0
