"""The figures of an engine as Prometheus metrics: one table says all of them.

A reading is taken by the thread that runs the engine, between steps, at most once a second and
whenever the engine becomes idle. Scrapes are answered by threads of their own from the latest
reading, so that they never touch the engine. Every server has a registry of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.free_lists import USEFUL_RUN

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine
    from pagedjax.engine.stats import EngineStats
    from scheduler.block_map import BlockMap

NAMESPACE = "pagedjax"
REGIONS = 256
"""Parts of the pool of which the block map tells how full they are."""

INTERVAL_S = 1.0


class Reading(NamedTuple):
    """An engine's figures at one moment."""

    stats: EngineStats
    blocks: BlockMap


Value = float | Mapping[str, float]


class Entry(NamedTuple):
    """One metric.

    Attributes:
        name: without the namespace; counters get `_total` appended by Prometheus' rules.
        help: what it means, with its unit.
        read: its value, or values by label.
        label: name of the label, if there are several values.
    """

    name: str
    help: str
    read: Callable[[Reading], Value]
    label: str | None = None


GAUGES = (
    Entry("running_sequences", "Sequences that own KV blocks.", lambda r: r.stats.num_running),
    Entry("waiting_sequences", "Sequences that wait to run.", lambda r: r.stats.num_waiting),
    Entry(
        "kv_blocks",
        "KV blocks: used by sequences, cached (free, with a prefix to be found), blank.",
        lambda r: {
            "used": r.stats.blocks_used,
            "cached": r.stats.blocks_cached,
            "blank": r.stats.blocks_total - r.stats.blocks_used - r.stats.blocks_cached,
        },
        "state",
    ),
    Entry("kv_utilisation_ratio", "Used KV blocks of all.", lambda r: r.stats.block_utilisation),
    Entry(
        "kv_peak_utilisation_ratio",
        "Most KV blocks in use at the end of any step, of all.",
        lambda r: r.stats.peak_block_utilisation,
    ),
    Entry(
        "kv_internal_fragmentation_ratio",
        "Positions of used KV blocks without a token, of all their positions.",
        lambda r: r.blocks.internal_fragmentation,
    ),
    Entry(
        "kv_external_fragmentation_ratio",
        f"Free KV blocks in runs of fewer than {USEFUL_RUN} neighbours, of all KV blocks.",
        lambda r: r.blocks.external_fragmentation,
    ),
    Entry(
        "prefix_hit_ratio",
        "Prompt tokens that were in the cache, of all looked up, by where they were found.",
        lambda r: r.stats.hit_rates,
        "tier",
    ),
    Entry(
        "kv_lower_tier_blocks",
        "KV blocks in host memory and on the disk.",
        lambda r: {"host": r.stats.lower.host_blocks_used, "disk": r.stats.lower.disk_blocks_used},
        "tier",
    ),
    Entry("kv_pool_bytes", "Bytes of the KV pool.", lambda r: r.stats.pool_bytes),
    Entry(
        "kv_region_used_ratio",
        "Block map: used KV blocks of each region of neighbours.",
        lambda r: region_shares(r.blocks)[0],
        "region",
    ),
    Entry(
        "kv_region_cached_ratio",
        "Block map: cached KV blocks of each region of neighbours.",
        lambda r: region_shares(r.blocks)[1],
        "region",
    ),
)

COUNTERS = (
    Entry("steps", "Steps launched.", lambda r: r.stats.steps),
    Entry("prompt_tokens", "Tokens of accepted prompts.", lambda r: r.stats.prompt_tokens),
    Entry("generated_tokens", "Tokens of the answers so far.", lambda r: r.stats.generated_tokens),
    Entry(
        "prefix_lookup_tokens",
        "Prompt tokens of admitted sequences, looked up in the prefix cache.",
        lambda r: r.stats.prefix_lookup_tokens,
    ),
    Entry(
        "prefix_hit_tokens",
        "Prompt tokens that were in the cache and not computed.",
        lambda r: r.stats.prefix_hit_tokens,
    ),
    Entry(
        "prefix_evictions",
        "KV blocks with a prefix that were handed out again.",
        lambda r: r.stats.evictions,
    ),
    Entry(
        "preemptions",
        "Sequences that lost their KV blocks, by how they get them back.",
        lambda r: {"recompute": r.stats.preemptions - r.stats.swaps, "swap": r.stats.swaps},
        "kind",
    ),
    Entry(
        "kv_block_copies",
        "KV blocks copied within the pool, because their sequence wrote to a shared one.",
        lambda r: r.stats.blocks_copied,
    ),
    Entry(
        "kv_moved_bytes",
        "Bytes of KV blocks that were copied, by where from and to.",
        lambda r: r.stats.moved_bytes,
        "path",
    ),
    Entry(
        "kv_lower_tier_hits",
        "KV blocks that were loaded for a prefix found below the pool, by where.",
        lambda r: {"host": r.stats.lower.counts.host_hits, "disk": r.stats.lower.counts.disk_hits},
        "tier",
    ),
    Entry(
        "kv_lower_tier_evictions",
        "KV blocks that left host memory or the disk for want of room.",
        lambda r: {
            "host": r.stats.lower.counts.host_evictions,
            "disk": r.stats.lower.counts.disk_evictions,
        },
        "tier",
    ),
    Entry(
        "kv_lower_tier_losses",
        "KV blocks that a tier had no room for, could not write or could not read.",
        lambda r: {
            "host_full": r.stats.lower.counts.not_stored,
            "disk_write": r.stats.lower.counts.failed_spills,
            "disk_read": r.stats.lower.counts.failed_reads,
        },
        "kind",
    ),
    Entry(
        "compiles_after_warmup",
        "Steps compiled after warm-up; any is a defect.",
        lambda r: r.stats.compiles_after_warmup,
    ),
)


def region_shares(blocks: BlockMap) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of used and of cached blocks in each region; names sort in the pool's order."""
    size, used, cached = blocks.regions(REGIONS)
    names = [f"{index:03d}" for index in range(len(size))]
    return (
        dict(zip(names, (used / size).tolist(), strict=True)),
        dict(zip(names, (cached / size).tolist(), strict=True)),
    )


class EngineMetrics(Collector):
    """Takes readings of one engine, and shows the latest to Prometheus.

    Args:
        engine: read by `look` alone.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = Reading(engine.stats(), engine.block_map())
        self._due = time.monotonic() + INTERVAL_S

    def look(self) -> None:
        """Take a reading if one is due; to be called by the engine's thread after a step."""
        now = time.monotonic()
        if now >= self._due or not self._engine.has_unfinished():
            self._reading = Reading(self._engine.stats(), self._engine.block_map())
            self._due = now + INTERVAL_S

    def collect(self) -> Iterator[Metric]:
        """The latest reading; called by a scrape's thread."""
        reading = self._reading
        for family, entries in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for entry in entries:
                value, name = entry.read(reading), f"{NAMESPACE}_{entry.name}"
                if not isinstance(value, Mapping):
                    yield family(name, entry.help, value=value)
                    continue
                labelled = family(name, entry.help, labels=[entry.label or ""])
                for label, one in value.items():
                    labelled.add_metric([label], one)
                yield labelled


class MetricsServer:
    """Serves an engine's metrics as Prometheus text over HTTP, under any path.

    Args:
        engine: whose.
        port: where; 0 takes a free one.
        host: address to listen at; other machines reach only "0.0.0.0" or an address of this one.

    Attributes:
        port: where it listens.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, engine: Engine, port: int, host: str = "127.0.0.1") -> None:
        self._metrics = EngineMetrics(engine)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._metrics)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise OSError(f"cannot serve metrics at {host}:{port}: {error}") from error
        self.port: int = self._server.server_port

    def look(self) -> None:
        """See `EngineMetrics.look`."""
        self._metrics.look()

    def close(self) -> None:
        """Stop listening; does nothing the second time."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
