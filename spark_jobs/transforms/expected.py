"""Records → the rows they should have made, as digests. DataFrame → DataFrame, nothing is read or written here.

Records: source, offset, timestamp, topic, partition, key, value (binary). Rows: source, offset, timestamp, key_text,
digest (NULL: only PostgreSQL can tell), is_delete, is_void (says nothing about rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from spark_jobs.columns import Kind
from spark_jobs.encoding import spark_column, spark_digest
from spark_jobs.jsonb import jsonb_at, raw_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

    from spark_jobs.columns import Column
    from spark_jobs.targets import Target

ROOT: dict[str, tuple[str, ...]] = {"json": (), "debezium": ("after",)}
# Spark's parser takes 1000 digits and as many documents in each other. Beyond that it gives nothing of a record,
# whoever asks for the field: its row would be extra, and another one missing.
UNBOUNDED = {"maxNumLen": str(2**31 - 1), "maxNestingDepth": str(2**31 - 1)}


def expected_rows(records: DataFrame, target: Target, also: Sequence[str] = ()) -> DataFrame:
    """`also`: columns of the records that are kept beside."""
    parsed = _parsed(records, target)
    raw = {column.name: _raw(column, target) for column in target.columns}
    encoded = [spark_column(column, raw[column.name]) for column in target.columns]
    if target.guard:
        encoded += [F.concat(F.col(name).cast("string"), F.lit(";")) for name in ("source", "offset")]
    # concat() of a NULL is NULL: a column that cannot be told makes the row one that cannot be told.
    digest = spark_digest(F.concat(*encoded))
    return parsed.select(
        F.col("source"),
        F.col("offset"),
        F.col("timestamp"),
        _key_text(target, raw).alias("key_text"),
        F.when(~F.col("is_delete") & ~F.col("is_void"), digest).alias("digest"),
        F.col("is_delete"),
        F.col("is_void"),
        *also,
    )


def _parsed(records: DataFrame, target: Target) -> DataFrame:
    text = records.withColumn("value_text", F.col("value").cast("string")).withColumn(
        "key_string", F.col("key").cast("string")
    )
    schema = T.StructType(_fields([column for column in target.columns if column.origin == "value"]))
    if target.format == "debezium":
        inner = T.StructType(
            [
                T.StructField("op", T.StringType()),
                T.StructField("before", schema),
                T.StructField("after", schema),
            ]
        )
        envelope = T.StructType([*inner.fields, T.StructField("payload", inner)])
        document = F.from_json("value_text", envelope, UNBOUNDED)
        bare = F.struct(*(F.col(f"envelope.{field.name}") for field in inner.fields))
        text = text.withColumn("envelope", document).withColumn("document", F.coalesce(F.col("envelope.payload"), bare))
        operation = F.col("document.op")
        text = text.withColumn("is_delete", F.col("value").isNull() | F.coalesce(operation == "d", F.lit(False)))
        text = text.withColumn("is_void", ~F.col("is_delete") & F.coalesce(operation == "m", F.lit(False)))
    else:
        text = text.withColumn("is_delete", F.col("value").isNull()).withColumn("is_void", F.lit(False))
        if schema.fields:
            text = text.withColumn("document", F.from_json("value_text", schema, UNBOUNDED))
    if not target.delete_on_tombstone or not target.is_keyed:
        text = text.withColumn("is_void", F.col("is_void") | F.col("value").isNull())
        text = text.withColumn("is_delete", F.col("is_delete") & ~F.col("is_void"))
    key_names = [column.path[-1] if column.path else column.name for column in target.key]
    key_names += [column.path[0] for column in target.columns if column.origin == "key" and column.path]
    if key_names:
        fields = [T.StructField(name, T.StringType()) for name in dict.fromkeys(key_names)]
        wrapped = T.StructType([*fields, T.StructField("payload", T.StructType(fields))])
        is_object = F.col("key_string").startswith("{")
        text = text.withColumn("key_document", F.when(is_object, F.from_json("key_string", wrapped, UNBOUNDED)))
    return text


def _fields(columns: Sequence[Column]) -> list[T.StructField]:
    """A struct for the paths; leaves are texts, or arrays of them."""
    tree: dict[str, list[Column]] = {}
    for column in columns:
        tree.setdefault(column.path[0], []).append(column)
    fields = []
    for name, inside in tree.items():
        leaf = next((column for column in inside if len(column.path) == 1), None)
        if leaf is not None:
            kind = _leaf(leaf)
            fields.append(T.StructField(name, T.ArrayType(kind) if leaf.type.is_array else kind))
        else:
            deeper = [_stepped(column) for column in inside]
            fields.append(T.StructField(name, T.StructType(_fields(deeper))))
    return fields


def _leaf(column: Column) -> T.DataType:
    """A number with a fraction would pass through a double on its way into a text, and lose digits."""
    if column.type.kind is Kind.NUMERIC and column.type.is_bounded:
        return T.DecimalType(column.type.precision or 0, column.type.scale or 0)
    return T.StringType()


def _stepped(column: Column) -> Column:
    from dataclasses import replace

    return replace(column, path=column.path[1:])


def _field(base: str, path: Sequence[str]) -> SparkColumn:
    found = F.col(base)
    for name in path:
        found = found.getField(name)
    return found


def _raw(column: Column, target: Target) -> SparkColumn:
    """Its value as text, wherever it comes from."""
    match column.origin:
        case "value" if column.type.kind in {Kind.JSON, Kind.JSONB}:
            return _json_text(column, target)
        case "value" if column.type.kind is Kind.NUMERIC and not column.type.is_bounded:
            return F.btrim(_json_text(column, target), F.lit('"'))
        case "value":
            return _field("document", (*ROOT[target.format], *column.path))
        case "key" if column.path:
            return _key_field(column.path[0])
        case "key" if column.type.kind is Kind.BYTEA:
            return F.base64("key")  # as JSON would carry it
        case "key" if column.type.kind is Kind.JSONB:
            return F.udf(jsonb_at, T.StringType(), useArrow=False)(F.col("key_string"), F.array().cast("array<string>"))
        case "key":
            return F.col("key_string")
        case "timestamp":
            milliseconds = F.unix_millis("timestamp").cast("string")
            is_time = column.type.kind in {Kind.TIMESTAMP, Kind.TIMESTAMPTZ}
            return F.date_format("timestamp", "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'") if is_time else milliseconds
        case _:
            return F.col(column.origin).cast("string")


def _json_text(column: Column, target: Target) -> SparkColumn:
    at = F.udf(raw_at if column.type.kind is Kind.JSON else jsonb_at, T.StringType(), useArrow=False)
    if target.format == "json":
        return at(F.col("value_text"), F.array(*(F.lit(name) for name in column.path)))
    bare = at(F.col("value_text"), F.array(*(F.lit(name) for name in ("after", *column.path))))
    wrapped = at(F.col("value_text"), F.array(*(F.lit(name) for name in ("payload", "after", *column.path))))
    return F.when(F.col("envelope.payload").isNotNull(), wrapped).otherwise(bare)


def _key_field(name: str) -> SparkColumn:
    inside = F.coalesce(_field("key_document", ("payload", name)), _field("key_document", (name,)))
    return F.when(F.col("key_document").isNotNull(), inside).otherwise(F.col("key_string"))


def _key_text(target: Target, raw: dict[str, Any]) -> SparkColumn:
    """The key columns' encoding: from the row, and for a delete from what the record says is gone."""
    of_row = F.concat(*(spark_column(column, raw[column.name]) for column in target.key))
    of_delete = F.concat(*(spark_column(column, _deleted_key(column, target)) for column in target.key))
    return F.when(F.col("is_delete"), of_delete).otherwise(of_row)


def _deleted_key(column: Column, target: Target) -> SparkColumn:
    of_record = _key_field(column.path[-1] if column.path else column.name)
    if target.format != "debezium" or any(each.origin != "value" for each in target.key):
        return of_record
    before = F.col("document.before")
    return F.when(before.isNotNull(), _field("document", ("before", *column.path))).otherwise(of_record)
