"""Transactions: are they whole in the database, do the topics hold what manifests claim, do log and feed agree?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.cut import SETTLED_AFTER_MS, width_of
from spark_jobs.findings import Finding, Kind, Sample, Settled
from spark_jobs.manifests import VERSION
from spark_jobs.sources import feed_manifests, source_records
from spark_jobs.transforms import transactions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyspark.sql import DataFrame

    from spark_jobs.compare import Run
    from spark_jobs.cut import SourceCut
    from spark_jobs.database import Bucket

Place = tuple[int, int]
RANGES = "topic_id string, partition int, start bigint, ranges array<struct<first: bigint, next: bigint>>"


class Transactions:
    """The manifests of a run. None are read where the feed does not exist."""

    def __init__(self, run: Run) -> None:
        self._run = run
        manifests = feed_manifests(run.spark, run.kafka, run.settings.feed_topic, run.cut.feed)
        self.manifests = None if manifests is None else manifests.persist()
        self._runs = None if self.manifests is None else transactions.runs(self.manifests)
        self.count = 0
        self.unchecked = ""
        self.oldest_ms = dict(run.cut.feed_whole_from_ms)
        self.told: list[str] = []

    def close(self) -> None:
        if self.manifests is not None:
            self.manifests.unpersist()

    def check(self) -> list[Finding]:
        if self.manifests is None or self._runs is None:
            return []
        self._run.progress("reading manifests")
        counted = self.manifests.agg(
            F.countDistinct("transactional_id", "number").alias("transactions"),
            F.count_if(F.col("is_unreadable") & F.col("newer").isNull()).alias("unreadable"),
            F.count("newer").alias("newer"),
            F.max("newer").alias("version"),
        ).first()
        self._date_what_is_cut_short(self.manifests)
        self.count = counted["transactions"] if counted else 0
        if counted and counted["newer"]:
            self.unchecked = newer_told(self._run.settings.feed_topic, counted["newer"], counted["version"])
            return []
        found = []
        if counted and counted["unreadable"]:
            where = self._run.settings.feed_topic
            found.append(Finding(kind=Kind.MANIFEST_DIFFERS, where=where, count=counted["unreadable"]))
        if self._run.cut.mode == "transaction":
            found += self._half_applied(self._runs)
        found += [*self._beyond_end(self._runs), *self._contradicted(self._runs)]
        return [*found, *self._groups(self.manifests)]

    def _date_what_is_cut_short(self, manifests: DataFrame) -> None:
        """By the oldest manifest of each partition that retention has cut short. A manifest follows its decision within
        a minute: those before this one may be of decisions up to that much younger.
        """
        if None not in self.oldest_ms.values():
            return
        oldest = manifests.filter(~F.col("is_unreadable")).groupBy("feed_partition").agg(F.min("decided_at_ms"))
        for partition, decided_at_ms in oldest.collect():
            if self.oldest_ms.get(partition) is None:
                self.oldest_ms[partition] = decided_at_ms + SETTLED_AFTER_MS

    def _half_applied(self, runs: DataFrame) -> list[Finding]:
        # What was applied before a rewind still stands in the database.
        rows = [
            (
                source.position.topic_id,
                source.position.partition,
                source.position.start,
                source.position.written,
            )
            for source in self._run.cut.of_topics(self._run.cut.mapped)
            if source.facts is not None
        ]
        applied = self._run.spark.createDataFrame(rows, RANGES)
        broken = transactions.half_applied(runs, applied)
        return self._found(Kind.ATOMICITY_BROKEN, broken, lambda row: f"{row.applied} of {row.wanted} offsets applied")

    def _beyond_end(self, runs: DataFrame) -> list[Finding]:
        """Whatever is compared in this run: the feed's end was asked for before the topics', so they have all of it."""
        sources = [source for source in self._run.cut.sources if source.facts is not None]
        ends = self._run.spark.createDataFrame(
            [
                (source.position.topic_id, source.position.partition, source.position.source, source.facts.high)
                for source in sources
                if source.facts is not None
            ],
            "topic_id string, partition int, source int, high bigint",
        )
        wrong = transactions.beyond_end(runs, ends)
        return self._found(Kind.MANIFEST_DIFFERS, wrong, lambda row: f"{_told(sources, row)}: past the end")

    def _contradicted(self, runs: DataFrame) -> list[Finding]:
        """Cheap first here too: sums over the offsets that are claimed and those that are seen."""
        run = self._run
        sources = [source for source in run.cut.sources if source.ranges]
        visible = source_records(run.spark, run.kafka, sources)
        if visible is None:
            return []
        readable = run.spark.createDataFrame(
            [
                (source.position.topic_id, source.position.partition, source.position.source, first, last)
                for source in sources
                for first, last in source.ranges
            ],
            "topic_id string, partition int, source int, first bigint, next bigint",
        )
        width = width_of(sources, run.settings.buckets)
        claimed = transactions.claimed_offsets(runs, readable)
        claims = _sums(transactions.offset_sums(claimed.select("source", "offset"), width))
        if not claims:
            return []
        seen = _sums(transactions.offset_sums(visible.select("source", "offset"), width))
        differing = self._in_question([bucket for bucket, sums in claims.items() if seen.get(bucket) != sums])
        if not differing:
            return []
        low = {
            number: min(bucket for source, bucket in differing if source == number) * width for number, _ in differing
        }
        involved = [source for source in sources if source.position.source in low]
        seen_there = source_records(run.spark, run.kafka, involved, low=low)
        if seen_there is None:
            return []
        in_question = claimed.filter(_at_least(low))
        wrong = transactions.contradicted(in_question, seen_there)
        return self._found(Kind.MANIFEST_DIFFERS, wrong, lambda row: _told(sources, row))

    def _found(self, kind: Kind, wrong: DataFrame, told: Callable[[Any], str]) -> list[Finding]:
        """`wrong`: one row per transaction. All are counted, some are shown."""
        settings = self._run.settings
        rows = wrong.limit(settings.samples_max + 1).collect()
        if not rows:
            return []
        samples = tuple(
            Sample(detail=f"transaction {row.transactional_id} number {row.number}: {told(row)}")
            for row in rows[: settings.samples_max]
        )
        count = wrong.count() if len(rows) > settings.samples_max else len(rows)
        return [Finding(kind=kind, where=settings.feed_topic, count=count, samples=samples)]

    def _in_question(self, differing: list[Bucket]) -> list[Bucket]:
        """Without those of compacted topics: there a record that is claimed and gone contradicts nothing."""
        cut = self._run.cut
        topics = {source.position.source: source.position.topic for source in cut.sources}
        skipped = {topics[number] for number, _ in differing if topics[number] in cut.compacted}
        self.told += [
            f"the topic {topic} is compacted: manifests claim offsets there that hold no record, which is not compared"
            for topic in sorted(skipped)
        ]
        return [bucket for bucket in differing if topics[bucket[0]] not in skipped]

    def _groups(self, manifests: DataFrame) -> list[Finding]:
        # A group's offset does not say of which incarnation of its topic it is.
        remade = {source.position.topic for source in self._run.cut.sources if source.facts is None}
        ends = {
            (source.position.topic, source.position.partition): source.facts.high
            for source in self._run.cut.sources
            if source.facts is not None and source.position.topic not in remade
        }
        rows = (
            manifests.select(F.explode("group_offsets").alias("of"))
            .groupBy("of.group_id", "of.topic", "of.partition")
            .agg(F.max("of.next").alias("next"))
            .collect()
        )
        skipped = sum((row.topic, row.partition) not in ends for row in rows)
        if skipped:
            self.told.append(
                f"{skipped} group offsets are of topics that are not the relay's, or made again: not compared"
            )
        beyond = [row for row in rows if row.next > ends.get((row.topic, row.partition), row.next)]
        return [
            Finding(
                kind=Kind.GROUP_OFFSET_BEYOND,
                where=f"{row.topic}:{row.partition}",
                count=1,
                samples=(
                    Sample(detail=f"group {row.group_id} at {row.next}, the end is {ends[row.topic, row.partition]}"),
                ),
            )
            for row in beyond
        ]

    def names(self, places: Iterable[Place]) -> dict[Place, tuple[str, int]]:
        """Which transaction wrote the record at each place, as far as manifests tell."""
        by_number = {source.position.source: source.position for source in self._run.cut.sources}
        wanted = [
            (by_number[number].topic_id, by_number[number].partition, number, offset)
            for number, offset in set(places)
            if number in by_number
        ]
        if self._runs is None or not wanted:
            return {}
        frame = self._run.spark.createDataFrame(wanted, "topic_id string, partition int, source int, offset bigint")
        rows = transactions.written_by(self._runs, frame).collect()
        return {(row.source, row.offset): (row.transactional_id, row.number) for row in rows}

    def attribute(self, settled: Sequence[Settled]) -> list[Settled]:
        """Says which transaction a row belongs to, and calls a part of one that is not applied what it is."""
        places = {
            place
            for each in settled
            for place in (each.suspect.expected, each.suspect.found)
            if each.kind is not None and place is not None and None not in place
        }
        names = self.names(places)  # type: ignore[arg-type]
        positions = {source.position.source: source.position for source in self._run.cut.sources}
        told = []
        for each in settled:
            # Of an extra row the record that it names tells whose it is, of all others the record that is expected.
            place: Any = each.suspect.expected or each.suspect.found
            found: Any = each.suspect.found
            is_ahead = (
                each.kind in {Kind.ROW_EXTRA, Kind.ROW_DIFFERS}
                and found is not None
                and None not in found
                and found[0] in positions
                and found[1] >= positions[found[0]].next
                and not positions[found[0]].has_applied(found[1])
            )
            name = names.get(found if is_ahead else place)
            parts = [each.detail, f"transaction {name[0]} number {name[1]}" if name else ""]
            kind = each.kind
            if is_ahead:
                kind = Kind.ATOMICITY_BROKEN if name else kind
                parts.append("the relay's position has not reached the record that the row names")
            told.append(replace(each, kind=kind, detail="; ".join(part for part in parts if part)))
        return told


def _sums(frame: DataFrame) -> dict[tuple[int, int], tuple[int, int, int]]:
    return {(row.source, row.bucket): (row.offsets, row.high, row.xor) for row in frame.collect()}


def _at_least(low: dict[int, int]) -> Any:
    condition = F.lit(False)
    for number, offset in low.items():
        condition |= (F.col("source") == number) & (F.col("offset") >= offset)
    return condition


def _told(sources: Sequence[SourceCut], row: Any) -> str:
    position = next(source.position for source in sources if source.position.source == row.source)
    more = f" and {row.offsets - 1} more" if row.offsets > 1 else ""
    return f"{position.topic}:{position.partition}:{row.offset} holds no committed record{more}"


def newer_told(topic: str, count: int, version: int) -> str:
    return (
        f"the feed {topic} holds {count} records of version {version}, this process reads up to {VERSION}: upgrade it; "
        "transactions are not compared"
    )
