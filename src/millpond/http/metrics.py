"""The page that Prometheus reads, and the counters of the HTTP server.

`prometheus_client` writes what is of the engine as a whole. The lines of queues are written here: at 5 us a line it
would take 50 ms for 500 queues, on the event loop that answers everybody.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from millpond.meters import STATES, TRANSITIONS, EngineReading, Histogram, QueueReading, cumulated

REQUEST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)
OTHER_CALLS = "(other)"  # what is no call of ours: a path of the client's must not become a label
STATUSES = ("gone", "1xx", "2xx", "3xx", "4xx", "5xx")  # gone: the client left before its reply
_END = b"# EOF\n"
NOTED_MAX = 1_000  # requests: to count those takes a tenth of a millisecond
_NO_FAILURES = {(job, reason): 0 for job in ("load", "turn") for reason in ("failed", "full")}  # there from the start

# ---- what the server counts -------------------------------------------------------------------------------


class CallMeter:
    """`noted` are requests that went well, and how long they took: they are counted together, before anybody looks."""

    __slots__ = ("_all", "_seconds", "_statuses", "noted")

    def __init__(self, all_calls: HttpMeter) -> None:
        self._all = all_calls
        self._statuses = [0] * len(STATUSES)
        self._seconds = Histogram(REQUEST_SECONDS)
        self.noted: list[float] = []

    def note(self, seconds: float, received: int, sent: int) -> None:
        """With every request of a hot call, so it must cost next to nothing."""
        noted, everything = self.noted, self._all
        noted.append(seconds)
        everything.bytes_received += received
        everything.bytes_sent += sent
        if len(noted) >= NOTED_MAX:
            self._count_noted()

    def count(self, status: int, seconds: float, received: int = 0, sent: int = 0) -> None:
        self._statuses[status // 100] += 1
        self._seconds.observe(seconds)
        self._all.bytes_received += received
        self._all.bytes_sent += sent

    @property
    def statuses(self) -> list[int]:
        self._count_noted()
        return self._statuses

    @property
    def seconds(self) -> Histogram:
        self._count_noted()
        return self._seconds

    def _count_noted(self) -> None:
        """The clock of the event loop tells milliseconds: there are few different ones."""
        noted, self.noted = self.noted, []
        self._statuses[2] += len(noted)
        for seconds, number in Counter(noted).items():
            self._seconds.observe(seconds, number)


class HttpMeter:
    """Counts for the calls and pages named here; all else is one more. The other numbers are the server's to keep."""

    __slots__ = ("_other", "bytes_received", "bytes_sent", "calls", "connections", "in_flight", "streams")

    def __init__(self, calls: Iterable[str]) -> None:
        self.calls = {name: CallMeter(self) for name in (*calls, OTHER_CALLS)}
        self._other = self.calls[OTHER_CALLS]
        self.in_flight = 0
        self.connections = 0
        self.streams = 0
        self.bytes_received = 0
        self.bytes_sent = 0

    def count(self, call: str, status: int, seconds: float) -> None:
        """Once for each request; a `status` of 0 is a client that left before its reply."""
        self.calls.get(call, self._other).count(status, seconds)

    def count_bytes(self, call: str, status: int, seconds: float, received: int, sent: int) -> None:
        """The same, with the sizes of the bodies."""
        self.calls.get(call, self._other).count(status, seconds, received, sent)


# ---- the page ---------------------------------------------------------------------------------------------


class MetricsPage:
    """To be asked on the engine's event loop: `read` looks at its memory."""

    def __init__(self, read: Callable[[], EngineReading], http: HttpMeter | None, version: str) -> None:
        self._read = read
        self._engine = EngineCollector(version)
        self._registry = CollectorRegistry()
        self._registry.register(self._engine)
        if http is not None:
            self._registry.register(HttpCollector(http))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def __call__(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its media type, by the Accept header: Prometheus text, or OpenMetrics."""
        self._engine.reading = reading = self._read()
        encode, media_type = choose_encoder(accept)
        page = encode(self._registry)
        if page.endswith(_END):
            return page[: -len(_END)] + queue_lines(reading.queues, open_metrics=True) + _END, media_type
        return page + queue_lines(reading.queues, open_metrics=False), media_type


# ---- queues -----------------------------------------------------------------------------------------------


class QueueFamily(msgspec.Struct, frozen=True):
    """A metric of every queue: one line, or one for each value of `label`; none where `values` are not known yet."""

    name: str
    purpose: str
    values: Callable[[QueueReading], Sequence[float] | None]
    label: str = ""
    labels: tuple[str, ...] = ()
    counter: bool = False

    def lines(self, queues: Iterable[QueueReading], open_metrics: bool) -> Iterator[str]:
        name = f"{self.name}_total" if self.counter else self.name
        family = self.name if open_metrics else name
        yield f"# HELP {family} {self.purpose}\n# TYPE {family} {'counter' if self.counter else 'gauge'}\n"
        labels = [f',{self.label}="{value}"' for value in self.labels] or [""]
        template = "".join([f'{name}{{queue="@"{label}}} %s\n' for label in labels])
        for queue in queues:
            if values := self.values(queue):
                yield template.replace("@", queue.queue) % tuple(values)  # no name has a letter that needs an escape


QUEUE_FAMILIES = (
    QueueFamily(
        "millpond_queue_items", "Items of a queue, by state.", lambda queue: queue.counts, "state", tuple(STATES)
    ),
    QueueFamily(
        "millpond_queue_transitions",
        "What has happened to items of a queue since it was created.",
        lambda queue: queue.transitions,
        "transition",
        TRANSITIONS,
        counter=True,
    ),
    QueueFamily(
        "millpond_queue_oldest_ready_age_seconds",
        "Since when the oldest item that could be leased has existed; 0 if there is none.",
        lambda queue: (queue.oldest_ready_s,),
    ),
    QueueFamily("millpond_queue_waiters", "Leases that wait for items.", lambda queue: (queue.waiters,)),
    QueueFamily(
        "millpond_queue_partitions_away",
        "Partitions of a queue that failed, or whose store does not answer.",
        lambda queue: (queue.away,),
    ),
    QueueFamily("millpond_queue_paused", "1 while a queue is paused.", lambda queue: (queue.paused,)),
)


def queue_lines(queues: Sequence[QueueReading], open_metrics: bool) -> bytes:
    return "".join([line for family in QUEUE_FAMILIES for line in family.lines(queues, open_metrics)]).encode()


# ---- the engine as a whole --------------------------------------------------------------------------------


class EngineCollector(Collector):
    def __init__(self, version: str) -> None:
        self._build = {"version": version, "python": platform.python_version()}
        self.reading: EngineReading | None = None

    def collect(self) -> Iterator[Metric]:
        reading = self.reading
        assert reading is not None, "set by whoever collects"
        yield InfoMetricFamily("millpond_build", "What runs here.", value=self._build)
        queues = GaugeMetricFamily(
            "millpond_queues", "Queues that are loaded, and those that sleep.", labels=["status"]
        )
        queues.add_metric(["awake"], reading.awake)
        queues.add_metric(["asleep"], reading.known - reading.awake)
        yield queues
        yield CounterMetricFamily("millpond_queue_loads", "Queues that were woken.", reading.meter.loads)
        yield CounterMetricFamily("millpond_panics", "Bugs that a queue survived; see the log.", reading.meter.panics)
        yield CounterMetricFamily(
            "millpond_registry_failures",
            "Reads and writes of the registry of queues that failed.",
            reading.meter.registry_failures,
        )
        partitions = GaugeMetricFamily(
            "millpond_partitions", "Partitions of the queues that are awake.", labels=["store", "status"]
        )
        for store in reading.meter.stores:
            for status in ("open", "closed", "full", "failed", "stalled"):
                partitions.add_metric([store, status], reading.partitions.get((store, status), 0))
        yield partitions
        yield from _stores(reading)


def _stores(reading: EngineReading) -> Iterator[Metric]:
    age = GaugeMetricFamily(
        "millpond_store_job_age_seconds", "How long the oldest read or commit under way takes.", labels=["store"]
    )
    failures = CounterMetricFamily(
        "millpond_store_failures", "Jobs of stores that failed.", labels=["store", "job", "reason"]
    )
    requests = HistogramMetricFamily("millpond_commit_requests", "Requests that shared a commit.", labels=["store"])
    items = HistogramMetricFamily("millpond_commit_items", "Transitions of items in a commit.", labels=["store"])
    seconds = HistogramMetricFamily("millpond_commit_seconds", "How long a commit took.", labels=["store"])
    for store, meter in reading.meter.stores.items():
        age.add_metric([store], reading.job_age_s[store])
        for (job, reason), count in (_NO_FAILURES | meter.failures).items():
            failures.add_metric([store, job, reason], count)
        for family, histogram in ((requests, meter.requests), (items, meter.items), (seconds, meter.seconds)):
            family.add_metric([store], cumulated(histogram), histogram.total)
    yield from (age, failures, requests, items, seconds)


# ---- the server -------------------------------------------------------------------------------------------


class HttpCollector(Collector):
    def __init__(self, meter: HttpMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        meter = self._meter
        yield GaugeMetricFamily("millpond_http_in_flight", "Requests that wait for their replies.", meter.in_flight)
        yield GaugeMetricFamily("millpond_http_connections", "Open connections.", meter.connections)
        yield GaugeMetricFamily("millpond_http_streams", "Open streams of subscribers.", meter.streams)
        yield CounterMetricFamily("millpond_http_received_bytes", "Bytes of request bodies.", meter.bytes_received)
        yield CounterMetricFamily("millpond_http_sent_bytes", "Bytes of reply bodies.", meter.bytes_sent)
        requests = CounterMetricFamily(
            "millpond_http_requests", "Requests, by call and class of status.", labels=["call", "status"]
        )
        seconds = HistogramMetricFamily(
            "millpond_http_request_seconds", "From a request to its reply, waits of leases included.", labels=["call"]
        )
        for name, call in meter.calls.items():
            if any(call.statuses):
                for status, count in zip(STATUSES, call.statuses, strict=True):
                    if count:
                        requests.add_metric([name, status], count)
                seconds.add_metric([name], cumulated(call.seconds), call.seconds.total)
        yield requests
        yield seconds
