"""What operators notice: what it costs to be watched, and how long their commands take."""

import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import uvloop

from coordinator.cluster import OwnTopics
from proof.bench import idle_ids
from proof.bench.context import Context
from proof.bench.instances import Coordinator, on_log
from proof.bench.jobs import JobProcess
from proof.bench.measure import Metric, Side, interleave
from proof.bench.our_producers import Job
from proof.bench.peer_confluent import Workload
from proof.bench.result import Result
from proof.bench.started import Ended, run

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))
PARTITIONS = 16
IDS = 100_000
PRODUCERS = 16
SCRAPES_PER_S = 1
SCRAPE_TIMEOUT_S = 30.0
# The difference is small: many short rounds in turn tell more of it than a few long ones.
ROUNDS_MORE, WARM_UP_TURNS = 3, 2
METRICS_COST = 0.98
HELP_MS, HELP_STARTS = 300.0, 5
FIRST_PAGE_MS, EVERYTHING_S, GROWTH_MB = 1_000.0, 15.0, 16.0
# The kernel counts in pages.
GROWTH_LEAST_MB = 0.1


def bench(context: Context) -> Iterator[Result]:
    """`metrics-cost`: commits per second of 16 producers while /metrics is asked for once a second, 15 times as often
    as our Prometheus does, against while nobody asks, in three times as many rounds as are asked for. `list-100000`:
    `oncebox txn list` where there are 100,000 ids, from the start of the command to its end with the first 100 rows;
    `-all`: with all rows (`--all`); `-memory`: how much more memory the command had at its most for all rows than for
    one. `help`: `oncebox --help`, the median of five.
    """
    yield from _help(context)
    yield from _metrics_cost(context)
    yield from _listing(context)


def _help(context: Context) -> Iterator[Result]:
    rounds = [median(1_000 * _run("--help").seconds for _ in range(HELP_STARTS)) for _ in range(context.rounds)]
    context.progress(f"help: {', '.join(f'{took_ms:.0f} ms' for took_ms in rounds)}")
    yield _result("operate/help", "ms", rounds, HELP_MS)


# --- metrics ---------------------------------------------------------------------------------------------------------


def _metrics_cost(context: Context) -> Iterator[Result]:
    context.progress("starting a coordinator")
    instance = context.start_coordinator()
    topic = context.new_topic(partitions=2)
    workload = Workload(producers=PRODUCERS, duration_s=context.duration_s / 2)
    job = Job(
        bootstrap_servers=context.bootstrap_servers,
        coordinator=instance.address,
        topic=topic,
        workload=workload,
        wait="decided",
    )
    with JobProcess("proof.bench.our_producers") as producers:

        def scraped() -> dict[str, float]:
            with _scraping(instance):
                return producers.run(job)

        yield from interleave(
            [
                Metric(
                    key="units_per_s",
                    name="operate/metrics-cost",
                    unit="commits/s",
                    better="higher",
                    target=METRICS_COST,
                )
            ],
            ours=Side(name="scraped", run=scraped),
            peer=Side(name="not scraped", run=lambda: producers.run(job)),
            rounds=ROUNDS_MORE * context.rounds,
            progress=context.progress,
            warm_up_turns=WARM_UP_TURNS,
        )


@contextmanager
def _scraping(instance: Coordinator) -> Iterator[None]:
    """At once, and then as often as is said above, until the block is left."""
    url = f"{instance.pages}/metrics"
    over = threading.Event()
    failures: list[Exception] = []

    def scrape() -> None:
        try:
            while True:
                with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as page:  # noqa: S310 - http, by us
                    page.read()
                if over.wait(1 / SCRAPES_PER_S):
                    return
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=scrape, name="scrape")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failures:
        raise failures[0]


# --- listing ---------------------------------------------------------------------------------------------------------


def _listing(context: Context) -> Iterator[Result]:
    environment = on_log(uuid.uuid4().hex[:8])
    log_topic, feed_topic = environment.values()
    context.progress(f"writing {IDS:,} ids")
    own = OwnTopics(log=log_topic, feed=feed_topic, partitions=PARTITIONS)
    context.delete_at_end([log_topic, feed_topic])
    now_ms = time.time_ns() // 1_000_000
    uvloop.run(idle_ids.write(context.bootstrap_servers, own, count=IDS, now_ms=now_ms))
    instance = context.start_coordinator(**environment)

    def listed(*options: str) -> Ended:
        return _run("txn", "list", "--coordinators", instance.address, *options)

    listed()  # brings the command's files into the page cache
    first_ms, everything_s, growth_mb = [], [], []
    for number in range(1, context.rounds + 1):
        page, everything, one = listed(), listed("--all"), listed("--all", "--prefix", "orders-service-0000007")
        first_ms.append(1_000 * page.seconds)
        everything_s.append(everything.seconds)
        growth_mb.append(max(everything.memory_mb - one.memory_mb, GROWTH_LEAST_MB))
        context.progress(
            f"round {number}: the first page after {first_ms[-1]:.0f} ms, all after {everything_s[-1]:.1f} s, "
            f"{growth_mb[-1]:.1f} MB more"
        )
    yield _result("operate/list-100000", "ms", first_ms, FIRST_PAGE_MS)
    yield _result("operate/list-100000-all", "s", everything_s, EVERYTHING_S)
    yield _result("operate/list-100000-memory", "MB", growth_mb, GROWTH_MB)


def _run(*arguments: str) -> Ended:
    """The `oncebox` command as a user starts it."""
    return run(ONCEBOX, *arguments)


def _result(name: str, unit: str, figures: list[float], limit: float) -> Result:
    return Result(
        name=name,
        unit=unit,
        better="lower",
        ours=tuple(figures),
        peer=(limit,) * len(figures),
        ours_name="Oncebox",
        peer_name="target",
        target=1.0,
    )
