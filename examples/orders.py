"""From events to a report, in two minutes: `make example`.

A shop's orders come in on a queue. Spark reads them exactly once, looks up each country's tax, keeps the result as
Parquet and puts it onto a second queue; what is no JSON it sends to the dead letters. Two consumers ship the parcels.
One carrier is down, so some of them end as dead letters too; those are found by SQL and brought back once it is up.
The report of all that opens at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import millpond
from millpond.spark import give_verdicts, parse_json, register, to_payload
from millpond.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS = 5_000
GARBLED = 250  # one order in so many is no JSON
BATCH = 500  # orders in one request
BATCH_MAX = 2_000  # orders in one micro-batch, so that there are some
CONSUMERS = 2
TAX = {"DE": 19, "FR": 20, "NL": 21, "PL": 23}  # per cent
DOWN = "PL"  # whose carrier does not answer at first
START_TIMEOUT_S = 20


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to leave everything; a new one without")
    parser.add_argument("--no-open", action="store_true", help="do not open the report in a browser")
    given = parser.parse_args(arguments)
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="millpond-example-"))).absolute()
    with served(folder / "data") as url, millpond.Client(url) as client:
        report = folder / "report.html"
        counts = run(client, url, folder, report)
    for name, count in counts.items():
        print(f"{name:<22} {count:>6}")
    print(f"\neverything is in {folder}\nthe report is {report}")
    if not given.no_open:
        webbrowser.open(report.as_uri())
    right = adds_up(counts)
    print("every order is accounted for, once" if right else "the numbers do not add up")
    return 0 if right else 1


def run(client: millpond.Client, url: str, folder: Path, report: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    make_queues(client)
    step("produce orders")
    counts["produced"] = produce(client)

    step("enrich them with Spark, exactly once")
    spark = session("orders")
    try:
        enrich(spark, url, folder)
        counts["enriched, in Parquet"] = spark.read.parquet(str(folder / "enriched")).count()
        enrich(spark, url, folder)  # from the checkpoint: there is nothing more to do, and nothing is done twice
    finally:
        spark.stop()
    counts["rejected, no JSON"] = waiting(client, "orders-dead")
    counts["onto the second queue"] = waiting(client, "parcels")

    step(f"ship the parcels; the carrier for {DOWN} is down")
    counts["shipped"] = ship(url, carrier_is_down=True)
    counts["could not be shipped"] = waiting(client, "parcels-dead")

    step("look at what died, and bring it back now that the carrier is up")
    where = "error like '%timed out%'"
    call("dlq", "redrive", "parcels-dead", "--where", where, "--dry-run", "--server", url)
    call("dlq", "redrive", "parcels-dead", "--where", where, "--rate", "5000/s", "--server", url)
    counts["shipped after all"] = ship(url, carrier_is_down=False)

    step("keep the history, and report")
    lake = str(folder / "history")
    call("history", "sync", "--server", url, "--lake", lake)
    call("history", "report", "--lake", lake, "--html", str(report))
    return counts


def adds_up(counts: Counter[str]) -> bool:
    return (
        counts["produced"] == ORDERS == counts["enriched, in Parquet"] + counts["rejected, no JSON"]
        and counts["onto the second queue"] == counts["enriched, in Parquet"]
        and counts["could not be shipped"] == counts["shipped after all"] > 0
        and counts["shipped"] + counts["shipped after all"] == counts["onto the second queue"]
    )


# ---- the steps ------------------------------------------------------------------------------------------------------


def make_queues(client: millpond.Client) -> None:
    for name in ("orders", "parcels"):
        client.create_queue(f"{name}-dead")
        client.create_queue(name, partitions=2, max_attempts=2, backoff={"base": 0}, dead_queue=f"{name}-dead")


def produce(client: millpond.Client) -> int:
    countries = list(TAX)
    orders = [
        json.dumps({"order": number, "country": countries[number % len(countries)], "cents": 100 + number % 9_900})
        if number % GARBLED
        else f"order {number}, please!"
        for number in range(ORDERS)
    ]
    return sum(len(client.produce("orders", orders[at : at + BATCH])) for at in range(0, ORDERS, BATCH))


def enrich(spark: SparkSession, url: str, folder: Path) -> None:
    register(spark)
    orders = spark.readStream.format("millpond").options(
        url=url, queue="orders", consumer="enricher", maxItemsPerBatch=str(BATCH_MAX)
    )
    query = (
        orders.load()
        .writeStream.foreachBatch(partial(enrich_batch, url, folder / "enriched"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def enrich_batch(url: str, enriched: Path, batch: DataFrame, number: int) -> None:
    """Spark may call this again with the same batch after a crash: then it does the same again, and changes nothing."""
    tax = batch.sparkSession.createDataFrame(list(TAX.items()), "country STRING, percent INT")
    parsed = parse_json(batch, "order INT, country STRING, cents INT").persist()
    orders = parsed.where("_corrupt is null").select("value.*", "correlation_id").join(tax, "country")
    billed = orders.selectExpr("order", "country", "cents", "cents * percent div 100 as tax", "correlation_id")
    billed.write.mode("overwrite").parquet(str(enriched / f"batch={number}"))
    sink = to_payload(billed, "correlation_id").write.format("millpond").mode("append")
    sink.options(url=url, queue="parcels", txn=f"enricher:{number + 1}").save()
    garbled = parsed.where("_corrupt is not null").selectExpr("id", "'dead' as verdict", "'this is no JSON' as error")
    give_verdicts(garbled, url=url, queue="orders", consumer="enricher")
    parsed.unpersist()


def ship(url: str, *, carrier_is_down: bool) -> int:
    """Consumers until there is nothing left: what raises is tried again, and dies after its last attempt."""
    shipped: Counter[str] = Counter()

    def work(name: str) -> None:
        with millpond.Client(url) as client:
            while items := client.lease("parcels", batch=BATCH, wait="1s", client_id=name):
                late = [item for item in items if carrier_is_down and json.loads(item.payload)["country"] == DOWN]
                lost = {item.id for item in late}
                done = [item for item in items if item.id not in lost]
                if late:
                    error = f"the carrier for {DOWN} timed out after {len(late)} tries"
                    client.retry([millpond.Retry(lease=item, error=error) for item in late])
                if done:
                    shipped[name] += sum(result.ok for result in client.complete(done))

    threads = [threading.Thread(target=work, args=(f"shipper-{number}",)) for number in range(CONSUMERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(shipped.values())


# ---- around them ----------------------------------------------------------------------------------------------------


def step(what: str) -> None:
    print(f"\n── {what}", flush=True)


def call(*words: str) -> None:
    print(f"$ millpond {' '.join(word if word.isalnum() else repr(word) for word in words)}", flush=True)
    subprocess.run([sys.executable, "-m", "millpond.cli", *words], check=True)


def waiting(client: millpond.Client, queue: str) -> int:
    """Dead letters are moved to their queue a moment after they died."""
    source = queue.removesuffix("-dead")
    while source != queue and client.stats(source).counts.get("dead", 0):
        time.sleep(0.05)
    return client.stats(queue).counts["ready"]


@contextmanager
def served(data: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    data.mkdir(parents=True, exist_ok=True)
    log = (data.parent / "server.log").open("w")
    server = [sys.executable, "-m", "millpond.cli", "serve", "--data", str(data), "--bind", f"127.0.0.1:{port}"]
    process = subprocess.Popen(server, stderr=log, env={**os.environ})
    try:
        url = f"http://127.0.0.1:{port}"
        with millpond.Client(url, timeout=START_TIMEOUT_S) as client:
            client.list_queues()  # a client tries again until the server is there
        yield url
    finally:
        process.terminate()
        process.wait()
        log.close()


if __name__ == "__main__":
    sys.exit(main())
