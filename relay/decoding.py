"""JSON values and keys into the values of columns. Pure. The seam for other formats: a Decoder.

The wanted fields are read straight into their types, so that a decimal keeps its digits and a document its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from relay.encoding import codec
from relay.inference import is_readable
from relay.types import BadRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from relay.types import Column, Target

ABSENT = msgspec.Raw()


# The fields that columns come from, in the order of the columns read from the value (None: the row is deleted); the row
# as it was, where it is deleted and the format tells; whether the record says nothing about rows. (A bare tuple: one
# is made for each record.)
Decoded = tuple["Sequence[Any] | None", "Sequence[Any] | None", bool]


class Decoder(Protocol):
    def __call__(self, value: bytes, /) -> Decoded: ...


def decoder(target: Target) -> Decoder:
    fields = value_fields(target)
    return _debezium(fields) if target.format == "debezium" else _json(fields)


def value_fields(target: Target) -> Fields:
    columns = [column for column in target.columns if column.source == "value"]
    return Fields(columns, strict=target.strict_fields, exclude=target.exclude)


class Fields:
    """A type that msgspec reads documents into, and how to get the columns' values out of it."""

    def __init__(
        self, columns: Sequence[Column], *, strict: bool = False, exclude: frozenset[str] = frozenset()
    ) -> None:
        tree: dict[str, Any] = {}
        for column in columns:
            if not all(map(is_readable, column.path)):
                raise BadRecordError(
                    f"the field of column {column.name!r} cannot be read, for its name has a quote, a backslash or a "
                    "control character: exclude it"
                )
            place = tree
            for name in column.path[:-1]:
                place = place.setdefault(name, {})
                if not isinstance(place, dict):
                    raise BadRecordError(f"{'.'.join(column.path)} lies inside a field that is a column itself")
            if isinstance(place.get(column.path[-1]), dict):
                raise BadRecordError(f"{'.'.join(column.path)} is a column, and so are fields inside it")
            other = place.setdefault(column.path[-1], column)
            if (other.type, other.unit) != (column.type, column.unit):
                raise BadRecordError(
                    f"the columns {other.name!r} and {column.name!r} come from one field and have different types"
                )
        self.type = _struct(tree, strict=strict, exclude=exclude)
        names = list(tree)
        is_flat = [column.path for column in columns] == [(name,) for name in names]
        raw = {at for at, column in enumerate(columns) if codec(column.type).is_raw}
        inside = {column.path[:-1] for column in columns}
        # Where the columns are the very fields of one document: how deep it lies.
        self.depth: int | None = None
        if is_flat and not raw and not exclude:
            self.values: Callable[[Any], Sequence[Any]] = msgspec.structs.astuple
            self.depth = 0
        elif (
            len(inside) == 1
            and len(names) == 1
            and not raw
            and not exclude
            and len({column.path for column in columns}) == len(columns)
        ):
            # All lie inside one document, such as Connect's payload.
            self.depth = len(inside.pop())
            self.values = _all_inside(["f0"] * self.depth, len(columns))
        else:
            getters = [_getter(_place(tree, column), raw=at in raw) for at, column in enumerate(columns)]
            self.values = lambda document: [get(document) for get in getters]


def _all_inside(names: Sequence[str], count: int) -> Callable[[Any], Sequence[Any]]:
    nothing = (None,) * count

    def get(document: Any) -> Sequence[Any]:
        for name in names:
            document = getattr(document, name)
            if document is None:
                return nothing
        return msgspec.structs.astuple(document)

    return get


def _struct(tree: dict[str, Any], *, strict: bool, exclude: frozenset[str] = frozenset()) -> Any:
    fields: list[tuple[str, Any, Any]] = []
    rename = {}
    for at, (name, inner) in enumerate(tree.items()):
        rename[f"f{at}"] = name
        if isinstance(inner, dict):
            fields.append((f"f{at}", _struct(inner, strict=False) | None, None))
        else:
            how = codec(inner.type, inner.unit)
            fields.append((f"f{at}", how.annotation, ABSENT) if how.is_raw else (f"f{at}", how.annotation | None, None))
    for at, name in enumerate(sorted(filter(is_readable, exclude - tree.keys()))):
        rename[f"x{at}"] = name
        fields.append((f"x{at}", msgspec.Raw, ABSENT))
    return msgspec.defstruct("Document", fields, rename=rename, forbid_unknown_fields=strict, gc=False)


def _place(tree: dict[str, Any], column: Column) -> list[str]:
    names = []
    for name in column.path:
        names.append(f"f{list(tree).index(name)}")
        tree = tree[name] if isinstance(tree[name], dict) else {}
    return names


def _getter(names: Sequence[str], *, raw: bool) -> Callable[[Any], Any]:
    def get(document: Any) -> Any:
        for name in names:
            document = getattr(document, name)
            if document is None:
                return None
        return None if raw and bytes(document) in {b"", b"null"} else document

    return get


def _json(fields: Fields) -> Decoder:
    decode = msgspec.json.Decoder(fields.type).decode
    values = fields.values

    def decoded(value: bytes) -> Decoded:
        return values(decode(value)), None, False

    return decoded


def _debezium(fields: Fields) -> Decoder:
    inside: list[tuple[str, Any, Any]] = [
        ("op", str | None, None),
        ("before", fields.type | None, None),
        ("after", fields.type | None, None),
    ]
    payload = msgspec.defstruct("Payload", inside)
    # With the schema beside it, or without.
    decode = msgspec.json.Decoder(msgspec.defstruct("Envelope", [*inside, ("payload", payload | None, None)])).decode

    def decoded(value: bytes) -> Decoded:
        envelope: Any = decode(value)
        envelope = envelope.payload or envelope
        if envelope.op == "d":
            return None, None if envelope.before is None else fields.values(envelope.before), False
        if envelope.op == "m":
            return None, None, True
        if envelope.op not in {"c", "u", "r"} or envelope.after is None:
            raise BadRecordError(f"the operation {envelope.op!r} of the envelope says nothing about one row")
        return fields.values(envelope.after), None, False

    return decoded


def key_decoder(columns: Sequence[Column]) -> Callable[[bytes], Sequence[Any]]:
    """From the record's key: a JSON object with the columns' fields, or, for a single column, the value itself."""
    fields = Fields(columns)
    wrapped = msgspec.defstruct("Wrapped", [("payload", fields.type | None, None)])
    decode, decode_wrapped = msgspec.json.Decoder(fields.type).decode, msgspec.json.Decoder(wrapped).decode
    (how, *others) = [codec(column.type, column.unit) for column in columns]

    def decoded(key: bytes) -> Sequence[Any]:
        if key.startswith(b"{"):
            outside: Any = decode_wrapped(key)
            return fields.values(decode(key) if outside.payload is None else outside.payload)
        if others:
            raise BadRecordError(f"the record's key is not a JSON object with {len(columns)} fields")
        return [scalar(key, how.annotation)]

    return decoded


def scalar(raw: bytes, annotation: Any) -> Any:
    """A bare key or header as a value of this type."""
    if annotation is bytes:
        return raw
    if annotation is msgspec.Raw:
        return msgspec.Raw(raw)
    return msgspec.convert(raw.decode(), annotation, strict=False)
