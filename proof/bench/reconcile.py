"""The reconciliation against datacompy's Spark comparison, and what a run costs in time and memory."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

from proof.bench import peer_datacompy
from proof.bench.context import Context
from proof.bench.measure import Metric, Side, interleave
from proof.bench.reconcile_data import RELAY, Place, add_rows, make_place, settings_for, spoil
from proof.bench.result import Result

NEW_ROWS, NEW_ROWS_QUICK = 100_000, 10_000
SMALL_ROWS = 100_000
# From one size to the next.
GROWTH = 10
SMALL_S = 25.0
MEMORY_GB = 2.5
INCREMENTAL_SHARE = 0.15
SPOILT_EVERY = 100
SAMPLE_S = 0.2


def bench(context: Context) -> Iterator[Result]:
    """One table and its topic of 4 partitions, 5 columns, 10⁷ rows (quick: 10⁶), on Spark local[2], with a heap of 4 GB
    (quick: 1 GB, which is too little for datacompy on 10⁷ rows of which some differ). `clean-vs-datacompy`: a full run
    that finds nothing against datacompy's SparkSQLCompare of the same two sides, in one session, both sides kept in
    Spark's cache for datacompy, each once before it counts. `1pct-vs-datacompy`: one row in a hundred changed, both in
    the session that is warm from the former. `growth`: a full run against ten times the time for a tenth of the rows,
    from 10⁵ on. `incremental`: 1 % new rows, against 0.15 of the full run. `memory`: driver, JVM and Python workers of
    a full run as a process of its own, with the default heap of 1 GB. `end-to-end`: 10⁵ rows by the command, Spark's
    start included. There are two rounds at most (quick: one), of `memory` and `end-to-end` one.
    """
    new_rows = NEW_ROWS_QUICK if context.quick else NEW_ROWS
    rounds = 1 if context.quick else min(context.rounds, 2)
    sizes = [SMALL_ROWS * GROWTH**power for power in range(2 if context.quick else 3)]
    places = [_place(context, sizes[0])]
    yield from _small(context, places[0])
    places += [_place(context, size) for size in sizes[1:]]
    place, rows = places[-1], sizes[-1]
    yield from _memory(context, place, rows)
    spark = _session("1g" if context.quick else "4g")
    try:
        clean = _vs_datacompy(context, spark, place, rounds, name="clean", target=3.0, warm_up_turns=1)
        yield clean
        for (smaller, few), (larger, many) in pairwise(zip(places, sizes, strict=True)):
            yield _growth(context, spark, smaller, larger, rounds, few=few, many=many)
        _run(spark, place, context, full=True, expected=0, store=True)
        add_rows(place, rows, rows + new_rows, context.progress)
        new = [_took_s(lambda: _run(spark, place, context, full=False, expected=0)) for _ in range(rounds)]
        share = [each * INCREMENTAL_SHARE for each in clean.ours]
        yield _ratio("reconcile/incremental", new, share, 1.0)
        context.progress("changing one row in a hundred")
        spoil(place, every=SPOILT_EVERY)
        yield _vs_datacompy(context, spark, place, rounds, name="1pct", target=2.0, warm_up_turns=0)
    finally:
        spark.stop()


def _place(context: Context, rows: int) -> Place:
    topic = context.new_topic(partitions=4)
    place = make_place(context.bootstrap_servers, context.new_database(), topic)
    add_rows(place, 0, rows, context.progress)
    return place


def _vs_datacompy(
    context: Context, spark: Any, place: Place, rounds: int, *, name: str, target: float, warm_up_turns: int
) -> Result:
    differs = name != "clean"
    (result,) = interleave(
        [Metric(key="took", name=f"reconcile/{name}-vs-datacompy", unit="s", better="lower", target=target)],
        ours=_side("Oncebox", lambda: _run(spark, place, context, full=True, expected=int(differs))),
        peer=_side("datacompy", lambda: _expect(peer_datacompy.compare(spark, place) is not differs)),
        rounds=rounds,
        progress=context.progress,
        warm_up_turns=warm_up_turns,
    )
    return result


def _growth(context: Context, spark: Any, smaller: Place, larger: Place, rounds: int, *, few: int, many: int) -> Result:
    (result,) = interleave(
        [Metric(key="took", name=f"reconcile/growth-{many}", unit="s", better="lower", target=1.0)],
        ours=_side(f"Oncebox, {many:,} rows", lambda: _run(spark, larger, context, full=True, expected=0)),
        peer=_side(
            f"{many // few} times {few:,} rows",
            lambda: _run(spark, smaller, context, full=True, expected=0),
            times=many // few,
        ),
        rounds=rounds,
        progress=context.progress,
        warm_up_turns=1,
    )
    return result


def _side(name: str, run: Callable[[], None], *, times: int = 1) -> Side:
    return Side(name=name, run=lambda: {"took": _took_s(run) * times})


def _took_s(run: Callable[[], None]) -> float:
    begun_s = time.monotonic()
    run()
    return time.monotonic() - begun_s


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


def _ratio(name: str, ours: list[float], peer: list[float], target: float, *, unit: str = "s") -> Result:
    return Result(
        name=name,
        unit=unit,
        better="lower",
        ours=tuple(ours),
        peer=tuple(peer),
        ours_name="Oncebox",
        peer_name="target",
        target=target,
    )


def _small(context: Context, place: Place) -> Iterator[Result]:
    took_s, _ = _command(context, place)
    yield _ratio(f"reconcile/end-to-end-{SMALL_ROWS}", [took_s], [SMALL_S], 1.0)


def _memory(context: Context, place: Place, rows: int) -> Iterator[Result]:
    took_s, peak_gb = _command(context, place)
    context.progress(f"{rows:,} rows by the command: {took_s:.1f} s, {peak_gb:.2f} GB")
    yield _ratio("reconcile/memory", [peak_gb], [MEMORY_GB], 1.0, unit="GB")


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
