"""Suspects → findings. Each suspected row is looked at by itself before it is called wrong: its record is read again,
and PostgreSQL says once more, by itself, what the record's row would be.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812

from spark_jobs.database import record_digests
from spark_jobs.findings import Kind, Settled, Suspect
from spark_jobs.frames import literal_frame
from spark_jobs.records import Record
from spark_jobs.snapshot import as_mapping
from spark_jobs.sources import letter_records, topic_records
from spark_jobs.transforms import difference
from spark_jobs.transforms.expected import expected_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from oncebox.wire import KafkaSettings
    from spark_jobs.cut import Cut, Range
    from spark_jobs.database import RowPlace, RowState
    from spark_jobs.snapshot import Snapshot
    from spark_jobs.targets import Table, Target

Place = tuple[int, int]  # source, offset
# So many rows that Spark calls different are put to PostgreSQL too (if one of them is right, so many at a time);
# neighbours, so that few records are read again.
ASKED_MAX = 1_000
SUPERSEDED, COMPACTED = "superseded", "compacted"
TIED, UNTOLD, REWOUND, LETTER, BEFORE = "tied", "untold", "rewound", "letter", "before"
IN_DOUBT = {difference.EXTRA, difference.AHEAD, difference.MOVED}
SIMPLE = {
    difference.MISSING: Kind.ROW_MISSING,
    difference.DIFFERS: Kind.ROW_DIFFERS,
    difference.OLDER: Kind.ROW_OLDER,
    difference.DUPLICATE: Kind.DUPLICATE,
    difference.MOVED: Kind.ROW_DIFFERS,
}


class Settler:
    """All that is needed to look a suspect up again."""

    def __init__(self, spark: SparkSession, kafka: KafkaSettings, snapshot: Snapshot, cut: Cut) -> None:
        self._spark = spark
        self._kafka = kafka
        self._snapshot = snapshot
        self._cut = cut
        self._sources = as_mapping(cut.sources)

    def settle(self, table: Table, suspects: Sequence[Suspect], *, untold: int = 0) -> list[Settled]:
        """`untold`: so many records of the table have keys that Spark cannot tell."""
        behind = {place for each in suspects if (place := _place(each)) is not None}
        committed = self.records(behind, is_committed=True)
        written = self.records(behind - committed.keys(), is_committed=False)
        right = self._right_after_all(table, suspects)
        tied = self._tied(suspects)
        without_key = self._without_key(table, committed)
        letters = self._letters_not_read(suspects)
        # What stands between the relay and the place where it was has been applied before: it may delete rows.
        is_rewound = table.first.is_keyed and any(
            source.position.is_rewound for source in self._cut.of_topics(table.topics)
        )
        # A table may hold what came before the place where the relay began; nothing tells those rows from others' own.
        begins_late = any(source.position.start for source in self._cut.of_topics(table.topics))
        settled = []
        for suspect in suspects:
            is_untold = _place(suspect) in without_key or (
                untold > 0 and not table.first.guard and suspect.opinion == difference.EXTRA
            )
            if suspect in right:
                settled.append(Settled(suspect=suspect, kind=None))
            elif letters.intersection(_both(suspect)):
                settled.append(Settled(suspect=suspect, kind=None, detail=LETTER))
            elif suspect in tied or is_untold:
                settled.append(Settled(suspect=suspect, kind=None, detail=TIED if suspect in tied else UNTOLD))
            elif suspect.opinion == difference.MISSING and is_rewound:
                settled.append(Settled(suspect=suspect, kind=None, detail=REWOUND))
            elif begins_late and _is_of_nothing(suspect):
                settled.append(Settled(suspect=suspect, kind=None, detail=BEFORE))
            elif suspect.opinion in SIMPLE:
                settled.append(Settled(suspect=suspect, kind=SIMPLE[suspect.opinion]))
            else:
                settled.append(behind_row(suspect, committed, written))
        return self._without_superseded(table, settled, committed, written)

    def records(self, places: Iterable[Place], *, is_committed: bool) -> dict[Place, Record]:
        """The records at these places, those that are there; what was mended and replayed is as it was replayed."""
        places = set(places)
        replayed = {place: self._cut.replayed[place] for place in places & self._cut.replayed.keys()}
        offsets: dict[str, dict[int, Range]] = defaultdict(dict)
        wanted = []
        for number, offset in places - replayed.keys():
            source = self._sources.get(number)
            if source is None or source.facts is None:
                continue
            top = source.facts.stable if is_committed else source.facts.high
            if not source.facts.log_start <= offset < top:
                continue
            position = source.position
            first, last = offsets[position.topic].get(position.partition, (offset, offset + 1))
            offsets[position.topic][position.partition] = (min(first, offset), max(last, offset + 1))
            wanted.append((position.topic, position.partition, offset, number))
        found = topic_records(self._spark, self._kafka, offsets, is_committed=is_committed)
        if found is None:
            return replayed
        columns = (("topic", "string"), ("partition", "int"), ("offset", "bigint"), ("source", "int"))
        places_frame = literal_frame(self._spark, columns, wanted)
        rows = found.join(F.broadcast(places_frame), ["topic", "partition", "offset"]).withColumn(
            "timestamp_ms", F.unix_millis("timestamp")
        )
        return replayed | {(row.source, row.offset): _record(row) for row in rows.collect()}

    def _right_after_all(self, table: Table, suspects: Sequence[Suspect]) -> set[Suspect]:
        """Where PostgreSQL makes of the record the very row that stands there, Spark's opinion was wrong."""
        different = [each for each in suspects if each.opinion == difference.DIFFERS]
        asked = sorted(different, key=lambda each: (each.expected_digest is not None, each.expected or (0, 0)))
        first = max(sum(each.expected_digest is None for each in asked), ASKED_MAX)
        right = self._rows_made(table, asked[:first])
        if any(each.expected_digest is not None for each in right):
            # Spark makes another row of some value than the relay does: nobody is called wrong by its word alone.
            for at in range(first, len(asked), ASKED_MAX):
                right |= self._rows_made(table, asked[at : at + ASKED_MAX])
        return right

    def _rows_made(self, table: Table, asked: Sequence[Suspect]) -> set[Suspect]:
        """Those that stand there as PostgreSQL makes them of their records."""
        records = self.records({each.expected for each in asked if each.expected}, is_committed=True)
        right = set()
        for target in table.targets:
            chosen = [
                (each, record)
                for each in asked
                if each.expected and (record := records.get(each.expected)) and record.topic == target.topic
            ]
            rows = [(each.expected[0], record) for each, record in chosen if each.expected]
            digests = record_digests(self._snapshot.calculated, target, rows)
            right |= {each for (each, _), digest in zip(chosen, digests, strict=True) if each.digest == digest}
        return right

    def _tied(self, suspects: Sequence[Suspect]) -> set[Suspect]:
        """Rows of keys that have records of the same time in two partitions: nobody can tell which of them is newer."""
        moved = [each for each in suspects if _is_moved(each)]
        records = self.records({place for each in moved for place in _both(each)}, is_committed=True)
        tied = set()
        for each in moved:
            one, other = (records.get(place) for place in _both(each))
            if one is not None and other is not None and one.timestamp_ms == other.timestamp_ms:
                tied.add(each)
        return tied

    def _letters_not_read(self, suspects: Sequence[Suspect]) -> set[Place]:
        """Of the suspects' records those that have dead letters past the number that a cut takes in: they were compared
        as if they had none.
        """
        if not self._cut.has_more_letters:
            return set()
        known = self._cut.replayed.keys() | {(each.source, each.offset) for each in self._cut.dead_letters}
        places = sorted({place for each in suspects for place in _both(each)} - known)
        if not places:
            return set()
        sources, offsets = zip(*places, strict=True)
        found = self._snapshot.rows("letters_at", relay=self._cut.relay, sources=list(sources), offsets=list(offsets))
        return {(source, offset) for source, offset in found}

    def _without_key(self, table: Table, committed: Mapping[Place, Record]) -> set[Place]:
        """Of these records those whose key Spark cannot tell: they stand behind a row that nothing is expected of."""
        found: set[Place] = set()
        for target in table.targets if table.first.is_keyed else ():
            of_target = {place: each for place, each in committed.items() if each.topic == target.topic}
            frame = letter_records(self._spark, self._cut.of_topics([target.topic]), of_target, also=of_target)
            if frame is not None:
                rows = expected_rows(frame, target).filter(F.col("key_text").isNull())
                found |= {(row.source, row.offset) for row in rows.select("source", "offset").collect()}
        return found

    def _without_superseded(
        self, table: Table, settled: list[Settled], committed: Mapping[Place, Any], written: Mapping[Place, Any]
    ) -> list[Settled]:
        """A row whose record is gone without a trace: compaction did that where its key stands past the cut, and may
        have done it where the topic is compacted by another key than the table's.
        """
        gone = {
            each
            for each in settled
            if each.kind is Kind.ROW_EXTRA and self._is_gone(table, _place(each.suspect), committed, written)
        }
        if not gone:
            return settled
        keys = {each.suspect.key_text for each in gone}
        later = self._keys_past_the_cut(table, keys) if table.first.is_keyed else set()
        is_compacted = any(topic in self._cut.compacted for topic in table.topics)
        told = []
        for each in settled:
            if each in gone and each.suspect.key_text in later:
                told.append(replace(each, kind=None, detail=SUPERSEDED))
            elif each in gone and is_compacted:
                told.append(replace(each, kind=None, detail=COMPACTED))  # nobody can tell it from an extra one
            else:
                told.append(each)
        return told

    def _is_gone(
        self, table: Table, place: Place | None, committed: Mapping[Place, Any], written: Mapping[Place, Any]
    ) -> bool:
        if place is None:
            return not table.first.guard  # its rows do not say which record they come from
        source = self._sources.get(place[0])
        # Also below the mark of an incremental run, which compares rows there that were written since.
        is_readable = (
            source is not None
            and source.facts is not None
            and source.facts.log_start <= place[1] < source.facts.stable
            and source.position.has_applied(place[1])
        )
        return is_readable and place not in committed and place not in written

    def _keys_past_the_cut(self, table: Table, keys: set[str]) -> set[str]:
        found: set[str] = set()
        for target in table.targets:
            frames = self._past(target)
            if frames is not None:
                rows = expected_rows(frames, target).filter(F.col("key_text").isin(sorted(keys)))
                found |= {row.key_text for row in rows.select("key_text").distinct().collect()}
        return found

    def _past(self, target: Target) -> DataFrame | None:
        offsets = {
            source.position.partition: (source.position.next, source.facts.stable)
            for source in self._cut.of_topics([target.topic])
            if source.facts is not None
        }
        records = topic_records(self._spark, self._kafka, {target.topic: offsets})
        return None if records is None else records.withColumn("source", F.lit(0))


def one_each(
    suspects: Sequence[Suspect], states: Mapping[str, RowState], is_unchecked: Callable[[RowPlace], bool]
) -> list[Suspect]:
    """One suspect per row of a table with keys. `states`: rows that stand there under keys that seem to be missing;
    they name a record outside of what was compared, or an old one.
    """
    told = {each.key_text for each in suspects if each.opinion not in {difference.MISSING, difference.EXTRA}}
    missing = {each.key_text for each in suspects if each.opinion == difference.MISSING}
    merged = []
    for each in suspects:
        state = states.get(each.key_text)
        if each.opinion == difference.MISSING:
            if each.key_text in told or (state is not None and is_unchecked(state.place)):
                continue
            merged.append(each if state is None else _elsewhere(each, state))
        elif each.opinion != difference.EXTRA or each.key_text not in missing or state is None:
            merged.append(each)
    return merged


def _elsewhere(missing: Suspect, state: RowState) -> Suspect:
    source, offset = state.place
    expected = missing.expected or (None, None)
    is_older = source == expected[0] and offset is not None and expected[1] is not None and offset < expected[1]
    return replace(
        missing,
        found=state.place,
        copies=state.copies,
        digest=state.digest,
        opinion=difference.OLDER if is_older else difference.AHEAD,
    )


def _place(suspect: Suspect) -> Place | None:
    """The record that the row says it comes from, where that is in doubt."""
    if suspect.opinion not in IN_DOUBT or suspect.found is None:
        return None
    source, offset = suspect.found
    return None if source is None or offset is None else (source, offset)


def _is_of_nothing(suspect: Suspect) -> bool:
    """An extra row of which neither its key nor what stands in it names a record."""
    return suspect.opinion == difference.EXTRA and suspect.expected is None and suspect.found == (None, None)


def _is_moved(suspect: Suspect) -> bool:
    """Whether the record that the row names is of another partition than the one that is expected."""
    if len(_both(suspect)) < 2 or _both(suspect)[0][0] == _both(suspect)[1][0]:
        return False
    return suspect.opinion == difference.MOVED or suspect.is_delete


def _both(suspect: Suspect) -> list[Place]:
    places = (suspect.expected or (None, None), suspect.found or (None, None))
    return [(source, offset) for source, offset in places if source is not None and offset is not None]


def behind_row(suspect: Suspect, committed: Mapping[Place, Any], written: Mapping[Place, Any]) -> Settled:
    """What the record that the row names makes of it."""
    place = _place(suspect)
    kind = Kind.ROW_EXTRA if suspect.expected is None or suspect.is_delete else Kind.ROW_DIFFERS
    if place is None:
        return Settled(suspect=suspect, kind=kind, detail="the row names no record")
    if place in written:
        return Settled(suspect=suspect, kind=Kind.ABORTED_DATA)
    if kind is Kind.ROW_DIFFERS:
        told = "the row names a record that is not its own" if place in committed else "the row names no record"
        return Settled(suspect=suspect, kind=kind, detail=told)
    return Settled(suspect=suspect, kind=kind)


def _record(row: Any) -> Record:
    return Record(
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
        timestamp_ms=row.timestamp_ms,
        key=None if row.key is None else bytes(row.key),
        value=None if row.value is None else bytes(row.value),
    )
