"""An engine for a test, and its metrics as Prometheus would read them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from millpond.clock import ManualClock
from millpond.embedded import AsyncPond
from millpond.http.metrics import HttpMeter, MetricsPage
from millpond.meters import TRANSITIONS
from millpond.model import State
from millpond.service.manager import IDLE_MS
from tests.service.looks import loaded, until

Scenario = Callable[[AsyncPond], Awaitable[None]]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def run(scenario: Scenario, path: Path | str = ":memory:", clock: ManualClock | None = None) -> None:
    async def opened() -> None:
        async with AsyncPond(path, clock=clock) as pond:
            await scenario(pond)

    asyncio.run(opened())


def page_of(pond: AsyncPond, meter: HttpMeter | None = None) -> MetricsPage:
    return MetricsPage(pond.reading, meter, "1.2.3")


class Scrape:
    """The samples of one page, found by name and labels."""

    def __init__(self, pond: AsyncPond, meter: HttpMeter | None = None, accept: str = "") -> None:
        body, self.media_type = page_of(pond, meter)(accept)
        parse = parse_open_metrics if accept == OPEN_METRICS else parse_text
        self.text = body.decode()
        self.samples: Samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in parse(self.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"millpond_{name}", frozenset(labels.items())]

    def items(self, queue: str) -> dict[str, float]:
        counts = {state.value: self("queue_items", queue=queue, state=state) for state in State}
        return {state: count for state, count in counts.items() if count}

    def transitions(self, queue: str) -> dict[str, float]:
        return {name: self("queue_transitions_total", queue=queue, transition=name) for name in TRANSITIONS}

    def queues(self) -> set[str]:
        return {value for _, labels in self.samples for label, value in labels if label == "queue"}


async def put_to_sleep(pond: AsyncPond, clock: ManualClock) -> None:
    clock.advance(IDLE_MS + 1)
    pond._manager.sweep()

    async def asleep() -> bool:
        return not await loaded(pond)

    await until(asleep)
