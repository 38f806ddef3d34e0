"""One canonical text for a row, in PostgreSQL's SQL and in Spark's, from one description of the columns.

Each column's text ends by itself (a number with `;`, a text after as many bytes as it said), so that no two rows share
one. NULL is `~`. docs/reconcile.md has the table; VECTORS are its published examples. What a Spark expression cannot
convert becomes NULL as a whole, never a guess: such a row is settled later by PostgreSQL itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_jobs.columns import Column, ColumnType, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

NULL = "~"
DIGEST_BITS = 60
HEX_DIGITS = DIGEST_BITS // 4
HALF_BITS = 30
MICROSECONDS_PER_DAY = 86_400_000_000
MICROSECOND_DIGITS = 6
YEAR_2000 = 946_684_800_000_000  # in microseconds since 1970
FINER_LENGTH = len("2026-01-02T03:04:05.0000000")
MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1, "days": MICROSECONDS_PER_DAY}

# type, a JSON value as it stands in a record (None: null), its encoding. Both sides are tested against these.
VECTORS: tuple[tuple[str, str | None, str], ...] = (
    ("bigint", "-42", "-42;"),
    ("bigint", None, "~"),
    ("numeric(12,2)", "19.50", "19.5;"),
    ("numeric(12,2)", "1.005", "1.01;"),
    ("numeric", "100", "100;"),
    ("numeric", "-0.0", "0;"),
    ("double precision", "1.5", "3ff8000000000000;"),
    ("real", "-0.0", "80000000;"),
    ("real", "1.0000000596046448", "3f800000;"),
    ("boolean", "true", "t;"),
    ("text", '"né~;"', "5:né~;"),
    ("text", '""', "0:"),
    ("character(4)", '"ab"', "2:ab"),
    ("timestamp with time zone", '"2026-01-02T03:04:05.678901+02:00"', "1767315845678901;"),
    ("timestamp with time zone", '"2026-01-02T03:04:05.6789005Z"', "1767323045678901;"),
    ("timestamp with time zone", '"2026-01-02T03:04:59.999999999+02:00"', "1767315900000000;"),
    ("timestamp without time zone", '"1969-12-31T23:59:59.5"', "-500000;"),
    ("timestamp without time zone", '"2026-01-02T03:04:05.000000499Z"', "1767323045000000;"),
    ("timestamp(3) without time zone", '"2026-01-02T03:04:05.678500Z"', "1767323045679000;"),
    ("timestamp(3) with time zone", '"1999-12-31T23:59:59.9995Z"', "946684799999000;"),
    ("timestamp(0) without time zone", '"1969-12-31T23:59:59.5"', "-1000000;"),
    ("timestamp(3) with time zone[]", '["2026-01-02T03:04:05.6785Z"]', "[1:1][1767323045679000;]"),
    ("date", '"2026-01-02"', "20455;"),
    ("uuid", '"6F9619FF-8B86-D011-B42D-00C04FC964FF"', "6f9619ff-8b86-d011-b42d-00c04fc964ff;"),
    ("uuid", '"6F9619FF8B86D011B42D00C04FC964FF"', "6f9619ff-8b86-d011-b42d-00c04fc964ff;"),
    ("jsonb", '{"b": [1, null], "a": "x"}', '26:{"a": "x", "b": [1, null]}'),
    ("json", r'{"b": [1,  null], "a": "x\u0000"}', r'33:{"b": [1,  null], "a": "x\u0000"}'),
    ("json", "1e200000", "8:1e200000"),
    ("bytea", '"AP+A"', "00ff80;"),
    ("integer[]", "[1, null, 3]", "[1:3][1;~3;]"),
    ("text[]", "[]", "[]"),
)


def sql_value(kind: Kind, value: str) -> str:
    """The encoding of one value that is not NULL; `value` is an SQL expression. NULL stays NULL."""
    match kind:
        case Kind.INTEGER | Kind.UUID:
            return f"{value}::text || ';'"
        case Kind.NUMERIC:
            return f"trim_scale({value})::text || ';'"
        case Kind.FLOAT4:
            return f"encode(float4send({value}), 'hex') || ';'"
        case Kind.FLOAT8:
            return f"encode(float8send({value}), 'hex') || ';'"
        case Kind.BOOLEAN:
            return f"CASE WHEN {value} THEN 't;' WHEN NOT {value} THEN 'f;' END"
        case Kind.TEXT:
            return f"octet_length({value}) || ':' || {value}"
        case Kind.CHARACTER | Kind.JSON:
            return f"octet_length({value}::text) || ':' || {value}::text"
        case Kind.JSONB:
            return f"octet_length({value}::jsonb::text) || ':' || {value}::jsonb::text"
        case Kind.BYTEA:
            return f"encode({value}, 'hex') || ';'"
        case Kind.TIMESTAMP | Kind.TIMESTAMPTZ:
            micros = f"(extract(epoch FROM {value}) * 1000000)::bigint::text"
            return f"CASE WHEN isfinite({value}) THEN {micros} ELSE {value}::text END || ';'"
        case Kind.DATE:
            return f"CASE WHEN isfinite({value}) THEN ({value} - DATE '1970-01-01')::text ELSE {value}::text END || ';'"


def sql_column(column_type: ColumnType, value: str) -> str:
    if not column_type.is_array:
        return f"coalesce({sql_value(column_type.kind, value)}, '{NULL}')"
    element = f"coalesce({sql_value(column_type.kind, 'u.e')}, '{NULL}')"
    joined = f"(SELECT string_agg({element}, '' ORDER BY u.o) FROM unnest({value}) WITH ORDINALITY AS u (e, o))"  # noqa: S608
    # array_dims: an array of two dimensions is not the same as a flat one.
    return (
        f"CASE WHEN {value} IS NULL THEN '{NULL}' "
        f"ELSE coalesce(array_dims({value}), '') || '[' || coalesce({joined}, '') || ']' END"
    )


def sql_row(columns: Sequence[Column], quoted: Sequence[str]) -> str:
    """`quoted`: each column as SQL names it."""
    parts = [sql_column(column.type, name) for column, name in zip(columns, quoted, strict=True)]
    return " || ".join(f"({part})" for part in parts) if parts else "''"


def sql_digest(text: str) -> str:
    """The first 60 bits of the MD5, as a bigint that is never negative."""
    return f"('x' || left(md5({text}), {HEX_DIGITS}))::bit({DIGEST_BITS})::bigint"


def spark_value(column_type: ColumnType, raw: Any, unit: str | None = None) -> Any:
    """The encoding of one JSON scalar (a Spark column of strings) that is not null; NULL where it cannot be told."""
    from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's own examples name it

    match column_type.kind:
        case Kind.INTEGER:
            return F.concat(_cast(raw, "bigint").cast("string"), F.lit(";"))
        case Kind.NUMERIC:
            return F.concat(_numeric(column_type, raw), F.lit(";"))
        case Kind.FLOAT4:
            # The relay reads a double; of an array PostgreSQL reads each text by itself.
            number = raw if column_type.is_array else _cast(raw, "double")
            return _float_bits("Float", "floatToIntBits", _cast(number, "float"), 8)
        case Kind.FLOAT8:
            return _float_bits("Double", "doubleToLongBits", _cast(raw, "double"), 16)
        case Kind.BOOLEAN:
            return F.when(raw == "true", F.lit("t;")).when(raw == "false", F.lit("f;"))
        case Kind.TEXT:
            return _counted(raw)
        case Kind.CHARACTER:
            return _counted(F.rtrim(raw))
        case Kind.JSON | Kind.JSONB:
            return _counted(raw)  # already as the type writes it: see spark_jobs.transforms.expected
        case Kind.UUID:
            lowered = F.lower(raw)
            is_plain = lowered.rlike("^[0-9a-f]{32}$")  # which the relay takes, too
            dashed = F.regexp_replace(lowered, "^(.{8})(.{4})(.{4})(.{4})(.{12})$", "$1-$2-$3-$4-$5")
            is_dashed = lowered.rlike("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
            return F.concat(F.when(is_dashed, lowered).when(is_plain, dashed), F.lit(";"))
        case Kind.BYTEA:
            binary = F.try_to_binary(raw, F.lit("base64"))
            return F.concat(F.lower(F.hex(binary)), F.lit(";"))
        case Kind.DATE:
            return F.concat(_days(raw, unit).cast("string"), F.lit(";"))
        case Kind.TIMESTAMP | Kind.TIMESTAMPTZ:
            micros = _in_precision(column_type, _micros(raw, unit, is_element=column_type.is_array))
            return F.concat(micros.cast("string"), F.lit(";"))


def spark_column(column: Column, raw: Any) -> Any:
    """`raw`: strings, or arrays of them."""
    from pyspark.sql import functions as F  # noqa: N812

    if not column.type.is_array:
        return F.when(raw.isNull(), F.lit(NULL)).otherwise(spark_value(column.type, raw, column.unit))

    def element(each: Any) -> Any:
        return F.when(each.isNull(), F.lit(NULL)).otherwise(spark_value(column.type, each, column.unit))

    encoded = F.transform(raw, element)
    size = F.size(raw)
    dims = F.when(size == 0, F.lit("")).otherwise(F.concat(F.lit("[1:"), size.cast("string"), F.lit("]")))
    # array_join leaves nulls out: an element that cannot be told must make the whole unknown.
    known = F.forall(encoded, lambda each: each.isNotNull())
    joined = F.when(known, F.concat(dims, F.lit("["), F.array_join(encoded, ""), F.lit("]")))
    return F.when(raw.isNull(), F.lit(NULL)).otherwise(joined)


def spark_digest(text: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    return F.conv(F.substring(F.md5(text), 1, HEX_DIGITS), 16, 10).cast("bigint")


def _cast(raw: Any, name: str) -> Any:
    return raw.try_cast(name)


def _counted(text: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    return F.concat(F.octet_length(text).cast("string"), F.lit(":"), text)


def _numeric(column_type: ColumnType, raw: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    if column_type.is_bounded:
        text = _cast(raw, f"decimal({column_type.precision},{column_type.scale})").cast("string")
        return F.rtrim(F.rtrim(text, F.lit("0")), F.lit(".")) if column_type.scale else text
    # Any size, but no exponent: Spark's own decimals end at 38 digits.
    plain = raw.rlike(r"^-?[0-9]+(\.[0-9]+)?$")
    text = F.when(plain, F.regexp_replace(raw, r"^(-?)0+(?=[0-9])", "$1"))
    # "1.50" and "1.5" are one number, and so are "-0.0" and "0".
    trimmed = F.when(text.contains("."), F.regexp_replace(text, r"\.?0+$", "")).otherwise(text)
    return F.when(trimmed == "-0", F.lit("0")).otherwise(trimmed)


def _float_bits(type_name: str, method: str, value: Any, digits: int) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    bits = F.reflect(F.lit(f"java.lang.{type_name}"), F.lit(method), value)
    # reflect answers in text; a float's bits are a signed int of which hex() would show 64 bits.
    text = F.right(F.lpad(F.lower(F.hex(bits.cast("bigint"))), 16, "0"), F.lit(digits))
    return F.when(value.isNotNull(), F.concat(text, F.lit(";")))


def _micros(raw: Any, unit: str | None, *, is_element: bool = False) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    if unit is None:
        micros = F.unix_micros(_cast(raw, "timestamp"))
        is_finer = (F.length(raw) >= FINER_LENGTH) & raw.rlike(r"\.[0-9]{7}")  # the length is cheap, and mostly enough
        if is_element:  # PostgreSQL reads it by itself, and rounds by a rule of its own
            return F.when(~is_finer, micros)
        # As the relay reads a time: half up, by the seventh digit alone. Spark would cut the rest off.
        cut_off = F.unix_micros(_cast(F.regexp_replace(raw, r"(\.[0-9]{6})[0-9]+", "$1"), "timestamp"))
        is_up = F.regexp_extract(raw, r"\.[0-9]{6}([0-9])", 1) >= "5"
        return F.when(is_finer, cut_off + is_up.cast("bigint")).otherwise(micros)
    if unit == "ns":
        return F.floor(_cast(raw, "decimal(20,0)") / 1000).cast("bigint")
    return _cast(raw, "bigint") * F.lit(MICROSECONDS[unit])


def _in_precision(column_type: ColumnType, micros: Any) -> Any:
    """Of a timestamp(3): as PostgreSQL rounds, away from the begin of 2000, from which it counts."""
    from pyspark.sql import functions as F  # noqa: N812

    if column_type.precision is None or column_type.precision >= MICROSECOND_DIGITS:
        return micros
    step = 10 ** (MICROSECOND_DIGITS - column_type.precision)
    since = micros - F.lit(YEAR_2000)
    up = F.abs(since) + F.lit(step // 2)
    distance = up - up % F.lit(step)
    return F.when(since < 0, -distance).otherwise(distance) + F.lit(YEAR_2000)


def _days(raw: Any, unit: str | None) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    if unit is None:
        return F.unix_date(_cast(raw, "date"))
    if unit == "days":
        return _cast(raw, "bigint")
    return F.floor(_micros(raw, unit).cast("decimal(20,0)") / MICROSECONDS_PER_DAY).cast("bigint")
