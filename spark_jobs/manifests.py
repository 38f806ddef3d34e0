"""The feed's records as rows. A Python function decodes them: the messages are ours, few, and small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

VERSION = 1  # of the feed's records; newer ones are not read on a guess
RUN = T.StructType(
    [
        T.StructField("topic", T.StringType()),
        T.StructField("topic_id", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("first", T.LongType()),
        T.StructField("next", T.LongType()),
    ]
)
GROUP_OFFSET = T.StructType(
    [
        T.StructField("group_id", T.StringType()),
        T.StructField("topic", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("next", T.LongType()),
    ]
)
MANIFEST = T.StructType(
    [
        T.StructField("transactional_id", T.StringType()),
        T.StructField("number", T.LongType()),
        T.StructField("producer_id", T.LongType()),
        T.StructField("epoch", T.IntegerType()),
        T.StructField("started_at_ms", T.LongType()),
        T.StructField("decided_at_ms", T.LongType()),
        T.StructField("part", T.IntegerType()),
        T.StructField("part_count", T.IntegerType()),
        T.StructField("claimed", T.LongType()),  # records, as the manifest itself counts them
        T.StructField("runs", T.ArrayType(RUN)),
        T.StructField("group_offsets", T.ArrayType(GROUP_OFFSET)),
        T.StructField("is_unreadable", T.BooleanType()),
        T.StructField("newer", T.IntegerType()),  # the record's version, where this process does not know it
    ]
)


UNKNOWN: tuple[Any, ...] = ("", 0, 0, 0, 0, 0, 0, 0, 0, [], [])


def decode_manifest(value: bytes | None) -> tuple[Any, ...] | None:
    """None: not a manifest (a leader's record). One that cannot be read, or must not be, says nothing but that."""
    from google.protobuf.message import DecodeError

    from oncebox.v1 import manifest_pb2

    try:
        record = manifest_pb2.FeedRecord.FromString(bytes(value or b""))
    except DecodeError:
        return (*UNKNOWN, True, None)
    if record.version > VERSION:
        return (*UNKNOWN, True, record.version)
    if record.WhichOneof("record") == "leader":
        return None
    manifest = record.manifest
    runs = [
        (written.topic, written.topic_id.hex(), written.partition, run.offset_first, run.offset_next)
        for written in manifest.written
        for run in written.runs
    ]
    groups = [
        (group.group_id, offset.topic, offset.partition, offset.offset_next)
        for group in manifest.group_offsets
        for offset in group.offsets
    ]
    return (
        manifest.transactional_id,
        manifest.number,
        manifest.producer_id,
        manifest.epoch,
        manifest.started_at_ms,
        manifest.decided_at_ms,
        manifest.part,
        manifest.part_count,
        sum(written.record_count for written in manifest.written),
        runs,
        groups,
        record.WhichOneof("record") is None or not record.version,
        None,
    )


def decode(records: DataFrame) -> DataFrame:
    """topic, partition and offset of the feed become feed_partition and feed_offset; a repeated part is left out."""
    decoded = F.udf(decode_manifest, MANIFEST, useArrow=False)
    return (
        records.select(
            F.col("partition").alias("feed_partition"),
            F.col("offset").alias("feed_offset"),
            decoded("value").alias("manifest"),
        )
        .filter(F.col("manifest").isNotNull())
        .select("feed_partition", "feed_offset", "manifest.*")
    )
