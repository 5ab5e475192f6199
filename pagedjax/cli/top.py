"""`pagedjax top`: what a running engine does, live in the terminal."""

from __future__ import annotations

import http.client
import itertools
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated
from urllib.parse import urlsplit

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedjax.cli.errors import reports_errors
from pagedjax.metrics import NAMESPACE

TIMEOUT_S = 5.0
MAP_COLUMNS = 64
SHADES = " ░▒▓█"  # of the block map: share of used blocks, rounded up so that one block shows

Samples = Mapping[tuple[str, str], float]
"""Values by metric, without the namespace, and label (empty if it has none)."""


@reports_errors
def top(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Port, HOST:PORT or URL of the metrics.")
    ],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    count: Annotated[
        int | None, typer.Option(help="Looks to take; default: until Ctrl-C.", min=1)
    ] = None,
) -> None:
    """Show rates, utilisation, fragmentation and a map of the KV blocks of a running engine.

    The engine must serve its metrics: `LLM(model, metrics_port=9400)`, or `--metrics-port 9400`.

    Example: `pagedjax top 9400`
    """
    looks = screens(metrics_url(address), interval, count)
    console = Console()
    if not console.is_terminal:
        for shown in looks:
            console.print(shown)
        return
    with Live(next(looks), console=console, auto_refresh=False, screen=count is None) as live:
        for shown in looks:
            live.update(shown, refresh=True)


def metrics_url(address: str) -> str:
    """The URL for a port, HOST:PORT or URL.

    >>> metrics_url("9400")
    'http://127.0.0.1:9400/metrics'

    Raises:
        ValueError: it is none of these.
    """
    host = f"127.0.0.1:{address}" if address.isdecimal() else address
    url = address if "://" in address else f"http://{host}/metrics"
    try:
        # Looked at here: the system takes a port modulo 65536, and another engine may answer.
        parts = urlsplit(url)
        wrong = parts.port == 0 or not parts.hostname or parts.scheme not in ("http", "https")
    except ValueError as error:
        raise ValueError(f"{url} is no address of metrics: {error}") from error
    if wrong:
        raise ValueError(f"{url} is no address of metrics: wanted a port, HOST:PORT or URL")
    return url


def read_samples(url: str) -> dict[tuple[str, str], float]:
    """All metrics of this project at `url`.

    Raises:
        OSError: nothing answers there.
        ValueError: what answers is not an engine.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} shows no metrics of an engine: {error}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise OSError(f"nothing answers at {url}: {reason}") from error
    except (http.client.HTTPException, UnicodeDecodeError) as error:
        raise ValueError(f"{url} shows no metrics of an engine: {error!r}") from error
    samples = {
        (sample.name.removeprefix(f"{NAMESPACE}_"), next(iter(sample.labels.values()), "")): value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(f"{NAMESPACE}_")
        for value in [sample.value]
    }
    if ("steps_total", "") not in samples:
        raise ValueError(f"{url} shows no metrics of an engine")
    return samples


def screens(url: str, interval: float, count: int | None) -> Iterator[RenderableType]:
    """A picture of the engine now, and then one every `interval` seconds, `count` in all."""
    before, taken = read_samples(url), time.monotonic()
    yield screen(before, before, 1.0)
    for _ in itertools.islice(itertools.count(1), None if count is None else count - 1):
        time.sleep(interval)
        now, looked = read_samples(url), time.monotonic()
        yield screen(now, before, looked - taken)
        before, taken = now, looked


def screen(now: Samples, before: Samples, seconds: float) -> RenderableType:
    """Figures and block map; rates are over the `seconds` between the two looks."""

    def value(name: str, label: str = "") -> float:
        return now.get((name, label), 0.0)

    def rate(name: str) -> str:
        return f"{(value(name) - before.get((name, ''), 0.0)) / seconds:,.1f}/s"

    used, cached, blank = (value("kv_blocks", state) for state in ("used", "cached", "blank"))
    table = Table.grid(padding=(0, 3))
    for left, right in (
        (
            ("sequences", f"{value('running_sequences'):,.0f} running"),
            ("waiting", f"{value('waiting_sequences'):,.0f}"),
        ),
        (("generated", rate("generated_tokens_total")), ("prompts", rate("prompt_tokens_total"))),
        (
            ("steps", rate("steps_total")),
            ("compiled late", f"{value('compiles_after_warmup_total'):,.0f}"),
        ),
        (
            ("pool used", f"{value('kv_utilisation_ratio'):.1%}"),
            ("at most", f"{value('kv_peak_utilisation_ratio'):.1%}"),
        ),
        (
            ("waste in blocks", f"{value('kv_internal_fragmentation_ratio'):.1%}"),
            ("free in pieces", f"{value('kv_external_fragmentation_ratio'):.1%}"),
        ),
        (
            ("evicted", f"{value('prefix_evictions_total'):,.0f}"),
            ("blocks copied", f"{value('kv_block_copies_total'):,.0f}"),
        ),
    ):
        table.add_row(*(Text(text) for text in (*left, *right)))
    labelled = Table.grid(padding=(0, 3))
    for name, text in (
        ("prefix hits", by_label(now, "prefix_hit_ratio", percent)),
        ("preempted", by_label(now, "preemptions_total")),
        ("kept below", by_label(now, "kv_lower_tier_blocks")),
        ("bytes moved", by_label(now, "kv_moved_bytes_total")),
    ):
        labelled.add_row(Text(f"{name:15}"), Text(text))
    blocks = f"{used:,.0f} used  {cached:,.0f} cached  {blank:,.0f} blank"
    panel = Panel(block_map(now), title="KV blocks", expand=False)
    return Group(table, labelled, panel, Text(blocks))


def short(value: float) -> str:
    """A number in three digits or so.

    >>> short(12_345_678)
    '12.3M'
    """
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.0f}P"


def percent(value: float) -> str:
    """A share of all.

    >>> percent(0.1234)
    '12.3%'
    """
    return f"{value:.1%}"


def by_label(now: Samples, name: str, shown: Callable[[float], str] = short) -> str:
    """The values of a metric that are not 0, with their labels."""
    values = {label: value for (metric, label), value in now.items() if metric == name and value}
    texts = [f"{shown(value)} {label.replace('_', ' ')}" for label, value in values.items()]
    return ", ".join(texts) or shown(0.0)


def block_map(now: Samples) -> Text:
    """One character per region of the pool: red and dense where used, blue where cached."""
    used = sorted((k[1], v) for k, v in now.items() if k[0] == "kv_region_used_ratio")
    cached = sorted((k[1], v) for k, v in now.items() if k[0] == "kv_region_cached_ratio")
    shown = Text()
    for index, ((_, mine), (_, kept)) in enumerate(zip(used, cached, strict=True)):
        if index and index % MAP_COLUMNS == 0:
            shown.append("\n")
        share = max(mine, kept)
        shade = SHADES[-int(-share * (len(SHADES) - 1) // 1)]
        shown.append(shade if share else "·", style="red" if mine >= kept and mine else "blue")
    return shown
