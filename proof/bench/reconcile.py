"""The reconciliation against datacompy's Spark comparison, and what a run costs in time and memory."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

from proof.bench import peer_datacompy
from proof.bench.context import Context
from proof.bench.reconcile_data import RELAY, Place, add_rows, make_place, settings_for, spoil
from proof.bench.result import Result

ROWS, ROWS_QUICK = 10_000_000, 1_000_000
NEW_ROWS, NEW_ROWS_QUICK = 100_000, 10_000
SMALL_ROWS = 100_000
SMALL_S = 25.0
MEMORY_GB = 2.5
INCREMENTAL_SHARE = 0.15
SPOILT_EVERY = 100
SAMPLE_S = 0.2


def bench(context: Context) -> Iterator[Result]:
    """One table and its topic of 4 partitions, 5 columns, 10⁷ rows (quick: 10⁶), on Spark local[2], with a heap of 4 GB
    (quick: 1 GB, which is too little for datacompy on 10⁷ rows of which some differ). `clean-vs-datacompy`: a full run
    that finds nothing against datacompy's SparkSQLCompare of the same two sides, in one session, both sides kept in
    Spark's cache for datacompy. `1pct-vs-datacompy`: one row in a hundred changed. `incremental`: 1 % new rows, against
    0.15 of the full run. `memory`: driver, JVM and Python workers of a full run as a process of its own, with the
    default heap of 1 GB. `end-to-end`: 10⁵ rows by the command, Spark's start included.
    """
    rows = ROWS_QUICK if context.quick else ROWS
    new_rows = NEW_ROWS_QUICK if context.quick else NEW_ROWS
    rounds = 1 if context.quick else min(context.rounds, 2)
    yield from _small(context)
    place = _place(context)
    add_rows(place, 0, rows, context.progress)
    yield from _memory(context, place, rows)
    spark = _session("1g" if context.quick else "4g")
    try:
        full = _timed(
            context, "full run", lambda: _run(spark, place, context, full=True, expected=0), rounds, warm=True
        )
        peer = _timed(context, "datacompy", lambda: _expect(peer_datacompy.compare(spark, place)), rounds)
        yield _ratio("reconcile/clean-vs-datacompy", full, peer, 3.0)
        _run(spark, place, context, full=True, expected=0, store=True)
        add_rows(place, rows, rows + new_rows, context.progress)
        new = _timed(context, "incremental", lambda: _run(spark, place, context, full=False, expected=0), rounds)
        share = [each * INCREMENTAL_SHARE for each in full]
        yield _ratio("reconcile/incremental", new, share[: len(new)], 1.0, peer_name="target")
        context.progress("changing one row in a hundred")
        spoil(place, every=SPOILT_EVERY)
        ours = _timed(context, "full run", lambda: _run(spark, place, context, full=True, expected=1), rounds)
        peer = _timed(context, "datacompy", lambda: _expect(not peer_datacompy.compare(spark, place)), rounds)
        yield _ratio("reconcile/1pct-vs-datacompy", ours, peer, 2.0)
    finally:
        spark.stop()


def _place(context: Context) -> Place:
    topic = context.new_topic(partitions=4)
    return make_place(context.bootstrap_servers, context.new_database(), topic)


def _session(heap: str) -> Any:
    from spark_jobs.session import new_session

    return new_session(master="local[2]", driver_memory=heap)


def _run(spark: Any, place: Place, context: Context, *, full: bool, expected: int, store: bool = False) -> None:
    from spark_jobs import publish
    from spark_jobs.reconcile import reconcile

    settings = settings_for(place, full=full, relay=RELAY)
    result, cut, _ = reconcile(spark, settings, lambda _: None)
    if result.exit_code != expected:
        raise RuntimeError(f"expected exit code {expected}: {result.sentence}")
    context.progress(f"{result.kind}: {result.sentence[:90]} {result.steps_ms}")
    if store:
        publish.store(settings, result, cut)


def _expect(is_right: bool) -> None:
    if not is_right:
        raise RuntimeError("datacompy does not find what is there")


def _timed(context: Context, name: str, run: Any, rounds: int, *, warm: bool = False) -> list[float]:
    times_s = []
    for number in range(-1 if warm else 0, rounds):
        begun_s = time.monotonic()
        run()
        took_s = time.monotonic() - begun_s
        context.progress(f"{name}{' (warming up)' if number < 0 else ''}: {took_s:.1f} s")
        if number >= 0:
            times_s.append(took_s)
    return times_s


def _ratio(
    name: str, ours: list[float], peer: list[float], target: float, *, unit: str = "s", peer_name: str = "datacompy"
) -> Result:
    return Result(
        name=name,
        unit=unit,
        better="lower",
        ours=tuple(ours),
        peer=tuple(peer),
        ours_name="Oncebox",
        peer_name=peer_name,
        target=target,
    )


def _small(context: Context) -> Iterator[Result]:
    place = _place(context)
    add_rows(place, 0, SMALL_ROWS, context.progress)
    took_s, _ = _command(context, place)
    yield _ratio("reconcile/end-to-end-100000", [took_s], [SMALL_S], 1.0, peer_name="target")


def _memory(context: Context, place: Place, rows: int) -> Iterator[Result]:
    took_s, peak_gb = _command(context, place)
    context.progress(f"{rows:,} rows by the command: {took_s:.1f} s, {peak_gb:.2f} GB")
    yield _ratio("reconcile/memory", [peak_gb], [MEMORY_GB], 1.0, unit="GB", peer_name="target")


def _command(context: Context, place: Place) -> tuple[float, float]:
    """Seconds and peak gigabytes of `oncebox reconcile run`, all its processes together."""
    folder = context.new_folder()
    command = [
        str(Path(sys.executable).with_name("oncebox")),
        *("reconcile", "run", "--full", "--master", "local[2]", "--relay", RELAY),
        *("--bootstrap-servers", place.servers, "--dsn", place.dsn, "--report-folder", str(folder)),
    ]
    begun_s = time.monotonic()
    with open(folder / "output.log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        done = Event()
        peak: list[float] = [0.0]
        watcher = Thread(target=_watch, args=(process.pid, done, peak))
        watcher.start()
        code = process.wait(900)
        took_s = time.monotonic() - begun_s
        done.set()
        watcher.join()
        if code != 0:
            log.seek(0)
            raise RuntimeError(f"oncebox reconcile run ended with {code}: {log.read()[-500:]}")
    return took_s, peak[0]


def _watch(pid: int, done: Event, peak: list[float]) -> None:
    while not done.wait(SAMPLE_S):
        peak[0] = max(peak[0], sum(_resident_gb(each) for each in _family(pid)))


def _family(pid: int) -> list[int]:
    found, unseen = [], [pid]
    while unseen:
        parent = unseen.pop()
        found.append(parent)
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as children:
                    unseen += map(int, children.read().split())
        except OSError:
            continue
    return found


def _resident_gb(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except OSError:
        return 0.0
