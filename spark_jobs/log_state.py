"""The coordinator's log against its feed: each commit that the log remembers stands in the feed, no abort does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from spark_jobs.cut import SETTLED_AFTER_MS
from spark_jobs.facts import read_facts
from spark_jobs.findings import Finding, Kind, Sample
from spark_jobs.frames import literal_frame
from spark_jobs.sources import feed_manifests, topic_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from spark_jobs.compare import Run
    from spark_jobs.cut import Range

VERSION = 1  # of the log's records; newer ones are not read on a guess
COMMITTED, ABORTED = 1, 2
NOT_READ = -1  # in place of an outcome: of a record that cannot be read; its cause is the version, where that is newer
OWED = -2  # likewise, of a commit whose manifest may not be in the feed yet
PREPARE_COMMIT = 4
LOG_OFFSETS_MAX = 100_000
BOUND = (("partition", "int"), ("oldest_ms", "bigint"), ("is_cut_short", "boolean"))
OUTCOME = T.StructType(
    [
        T.StructField("transactional_id", T.StringType()),
        T.StructField("number", T.LongType()),
        T.StructField("result", T.IntegerType()),
        T.StructField("cause", T.IntegerType()),
        T.StructField("decided_at_ms", T.LongType()),
    ]
)
OPEN = T.StructType(
    [
        T.StructField("transactional_id", T.StringType()),
        T.StructField("number", T.LongType()),
        T.StructField("producer_id", T.LongType()),
        T.StructField("state", T.IntegerType()),
        T.StructField("started_at_ms", T.LongType()),
        T.StructField("epoch", T.IntegerType()),
    ]
)
OPEN_STATES = {2: "ONGOING", 3: "PREPARED", PREPARE_COMMIT: "PREPARE_COMMIT", 5: "PREPARE_ABORT"}


class NotReadError(Exception):
    """A record of the log that is not one of ours, or of a version that is not ours."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(version)
        self.version = version


def decode_state(key: bytes | None, value: bytes | None) -> tuple[str, Any] | None:
    """A transactional id and its state; None: another record of the log, or a tombstone."""
    from google.protobuf.message import DecodeError

    from oncebox.v1 import log_pb2

    try:
        name = log_pb2.LogKey.FromString(bytes(key or b""))
        state = log_pb2.LogValue.FromString(bytes(value or b""))
    except DecodeError as error:
        raise NotReadError from error
    if state.version > VERSION:
        raise NotReadError(state.version)
    if name.WhichOneof("key") is None or (value is not None and state.WhichOneof("value") is None):
        raise NotReadError
    if name.WhichOneof("key") != "transactional_id" or state.WhichOneof("value") != "id":
        return None
    return name.transactional_id, state.id


def decode_outcomes(key: bytes | None, value: bytes | None) -> list[tuple[Any, ...]]:
    """The decided transactions that a record of the log remembers."""
    try:
        found = decode_state(key, value)
    except NotReadError as error:
        return [("", 0, NOT_READ, error.version, 0)]
    if found is None:
        return []
    name, state = found
    owed = {each.number for each in state.transactions if each.state == PREPARE_COMMIT and not each.feed_offset_next}
    return [
        (name, each.number, OWED if each.number in owed else each.result, each.cause, each.decided_at_ms)
        for each in state.outcomes
    ]


def decode_open(key: bytes | None, value: bytes | None) -> list[tuple[Any, ...]]:
    """The transactions that a record of the log has not seen complete."""
    try:
        found = decode_state(key, value)
    except NotReadError:
        return []  # told by whoever reads the outcomes
    if found is None:
        return []
    name, state = found
    return [
        (name, each.number, each.producer_id, each.state, each.started_at_ms, each.epoch)
        for each in state.transactions
        if each.state in OPEN_STATES
    ]


def newest_states(records: DataFrame) -> DataFrame:
    return records.groupBy("partition", "key").agg(F.max_by("value", "offset").alias("value"))


def open_transactions(records: DataFrame) -> DataFrame:
    decoded = F.udf(decode_open, T.ArrayType(OPEN), useArrow=False)
    return newest_states(records).select(F.explode(decoded("key", "value")).alias("open")).select("open.*")


def outcomes(records: DataFrame) -> DataFrame:
    """Of the newest record of each id, with the log's partition."""
    decoded = F.udf(decode_outcomes, T.ArrayType(OUTCOME), useArrow=False)
    exploded = newest_states(records).select("partition", F.explode(decoded("key", "value")).alias("outcome"))
    return exploded.select("partition", "outcome.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheck:
    findings: tuple[Finding, ...] = ()
    unchecked: str = ""
    told: str = ""  # left to a full run


def log_ranges(run: Run) -> dict[int, Range]:
    """All there is; empty: there is no log of this name."""
    facts = read_facts(run.kafka, [run.settings.log_topic])
    return {
        partition: (each.log_start, each.stable) for partition, each in facts.get(run.settings.log_topic, {}).items()
    }


def check_log(run: Run, manifests: DataFrame | None, oldest_ms: Mapping[int, int | None]) -> LogCheck:
    """`oldest_ms`: of each partition, commits decided before are not among the manifests (retention, or an earlier run
    has read them); None: nobody knows, the partition is empty now and was not always.
    """
    settings = run.settings
    log = log_ranges(run)
    if not log and not run.cut.feed and run.cut.mode == "partition":
        return LogCheck(told="there is neither a log nor a feed of a coordinator: transactions are not compared")
    if not log or not run.cut.feed:
        absent = f"the feed {settings.feed_topic}" if log else f"the log {settings.log_topic}"
        return LogCheck(unchecked=f"{absent} does not exist: log and feed are not compared")
    if all(each is None for each in oldest_ms.values()):
        return LogCheck(unchecked=f"the feed {settings.feed_topic} is past retention: the log is not compared with it")
    if run.since is not None and sum(last - first for first, last in log.values()) > LOG_OFFSETS_MAX:
        return LogCheck(told=f"the log has more than {LOG_OFFSETS_MAX:,} records: only a full run compares it")
    records = topic_records(run.spark, run.kafka, {settings.log_topic: log}, is_committed=False)
    if records is None:
        return LogCheck()  # nothing was ever decided
    run.progress("comparing the coordinator's log with the feed")
    if manifests is None:
        manifests = run.spark.createDataFrame([], "transactional_id string, number bigint")
    named = manifests.select("transactional_id", "number")
    compared = _compared(run, records, named, oldest_ms)
    # Once more, with what stands in the feed by now: of a coordinator whose clock is behind all decisions look old.
    if any(result != NOT_READ for result, _ in compared.counts):
        later = feed_manifests(run.spark, run.kafka, settings.feed_topic, _feed_since(run))
        if later is not None:
            named = named.unionByName(later.select("transactional_id", "number"))
            compared = _compared(run, records, named, oldest_ms)
    wrong, counts = compared.wrong, compared.counts
    unchecked = not_read(settings.log_topic, {cause: n for (result, cause), n in counts.items() if result == NOT_READ})
    owed = sum(number for (result, _), number in counts.items() if result == OWED)
    if owed:
        unchecked = "; ".join(each for each in (unchecked, owed_told(settings.log_topic, owed)) if each)
    count = sum(number for (result, _), number in counts.items() if result not in {NOT_READ, OWED})
    told_old = _old_told(run, compared.absent) if None in run.cut.feed_whole_from_ms.values() else ""
    if not count:
        return LogCheck(unchecked=unchecked, told=told_old)
    rows = wrong.filter(~F.col("result").isin(NOT_READ, OWED)).limit(settings.samples_max).collect()
    told = {COMMITTED: "committed in the log, not in the feed", ABORTED: "aborted in the log, committed in the feed"}
    samples = tuple(
        Sample(detail=f"transaction {row.transactional_id} number {row.number}: {told[row.result]}") for row in rows
    )
    found = Finding(kind=Kind.LOG_DIFFERS, where=settings.log_topic, count=count, samples=samples)
    return LogCheck(findings=(found,), unchecked=unchecked, told=told_old)


class _Compared(NamedTuple):
    wrong: DataFrame
    absent: DataFrame  # commits that are not in the feed, also such as need not be
    counts: dict[tuple[int, int], int]  # of what is wrong: by result and cause


def _compared(run: Run, records: DataFrame, named: DataFrame, oldest_ms: Mapping[int, int | None]) -> _Compared:
    """`named`: the transactions that the feed tells of."""
    in_feed = named.distinct().withColumn("is_in_feed", F.lit(True))
    joined = outcomes(records).join(in_feed, ["transactional_id", "number"], "left")
    bounds = [(partition, each, run.cut.feed_whole_from_ms[partition] is None) for partition, each in oldest_ms.items()]
    frame = literal_frame(run.spark, BOUND, bounds)
    joined = joined.join(F.broadcast(frame), "partition", "left")
    # Young ones may have their manifest still on its way, or past the end up to which the feed is read: the next run's.
    is_settled = F.col("decided_at_ms") <= run.cut.at_ms - SETTLED_AFTER_MS
    is_absent = F.col("result").isin(COMMITTED, OWED) & F.col("is_in_feed").isNull() & is_settled
    is_missing = is_absent & (F.col("decided_at_ms") >= F.col("oldest_ms"))
    is_wrong = (F.col("result") == ABORTED) & F.col("is_in_feed")
    wrong = joined.filter(is_missing | is_wrong | (F.col("result") == NOT_READ))
    counts = {(row.result, row.cause): row["count"] for row in wrong.groupBy("result", "cause").count().collect()}
    return _Compared(wrong, joined.filter(is_absent), counts)


def _feed_since(run: Run) -> dict[int, Range]:
    """Of the feed what has come since the cut."""
    topic = run.settings.feed_topic
    return {
        partition: (max(run.cut.feed.get(partition, (0, 0))[1], each.log_start), each.stable)
        for partition, each in read_facts(run.kafka, [topic]).get(topic, {}).items()
    }


def _old_told(run: Run, absent: DataFrame) -> str:
    """Commits of which retention has left no manifest: nothing is wrong with them, and nothing is proved."""
    is_old = F.col("oldest_ms").isNull() | (F.col("decided_at_ms") < F.col("oldest_ms"))
    count = absent.filter(F.col("is_cut_short") & is_old).count()
    if not count:
        return ""
    return f"{count} commits of the log {run.settings.log_topic} are older than what retention has left of the feed"


def owed_told(topic: str, count: int) -> str:
    """A coordinator is gone between decision and manifest, or stands still; whoever leads next writes it."""
    return f"{topic}: {count} commits are decided and not in the feed yet, which the coordinator owes: run again later"


def not_read(topic: str, by_version: Mapping[int, int]) -> str:
    """`by_version`: how many records of a newer version; of version 0: that are none of ours."""
    told = [
        f"{topic} holds {count} records of version {version}, this process reads up to {VERSION}: upgrade it"
        if version
        else f"{topic} holds {count} records that cannot be read"
        for version, count in sorted(by_version.items())
    ]
    return "; ".join(f"{each}; what they say is not compared" for each in told)
