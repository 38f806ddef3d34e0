"""What a peek at the slot means: whole database transactions in commit order, and which of them are to be published.

Pure. A transaction is skipped if and only if its commit LSN is not above the resume token's; nothing else is ever left
out. A transaction too large for one slice of messages comes in several pieces, the last of which has its end.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from relay.outbox.pgoutput import (
    INSERT,
    Begin,
    Commit,
    LogicalMessage,
    ProtocolError,
    Relation,
    Values,
    inserted,
    parse,
)

BYTEA_OID = 17
REQUIRED = ("id", "aggregatetype", "aggregateid", "payload")
OPTIONAL = ("type", "headers", "created_at")


class TableError(Exception):
    """The outbox table or its publication is not as it should be."""


class Row(NamedTuple):
    """A row of the outbox, in PostgreSQL's text form; the payload in the bytes that are meant."""

    id: bytes | None
    aggregatetype: bytes | None
    aggregateid: bytes | None
    payload: bytes | None
    type: bytes | None
    headers: bytes | None


class MessageRow(Row):
    """Came as a logical message: no table has it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNames:
    """How the user's table calls them; None: it has no such column."""

    id: str = "id"
    aggregatetype: str = "aggregatetype"
    aggregateid: str = "aggregateid"
    payload: str = "payload"
    type: str | None = "type"
    headers: str | None = "headers"

    def required(self) -> tuple[str, str, str, str]:
        return self.id, self.aggregatetype, self.aggregateid, self.payload


@dataclass(slots=True, kw_only=True)
class Piece:
    """Rows of one database transaction; all of them, unless it is too large for one slice."""

    # The commit LSN, or the commit_seq.
    position: int
    commit_time_us: int
    rows: list[Row]
    is_published: bool
    # Where the source stands after this transaction. None: more of it comes with the next slice.
    end: int | None = None


Layout = Callable[[Values], Row]


def layout_of(relation: Relation, names: ColumnNames) -> Layout:
    """How to make a Row of the values of this relation; says which columns are missing."""
    places = {column.name: place for place, column in enumerate(relation.columns)}
    missing = [name for name in names.required() if name not in places]
    if missing:
        raise TableError(
            f"the table {relation.schema}.{relation.name} has no column {' and no '.join(missing)}: name them under "
            f"`columns`; it has {', '.join(places)}"
        )
    # An absent optional column is read from the place behind the last, where there is always NULL.
    nowhere = len(relation.columns)
    optional = [places.get(name, nowhere) if name else nowhere for name in (names.type, names.headers)]
    pick = itemgetter(*(places[name] for name in names.required()), *optional)
    is_bytea = relation.columns[places[names.payload]].type_oid == BYTEA_OID
    count = len(relation.columns)

    def layout(values: Values) -> Row:
        if len(values) != count:
            raise ProtocolError(f"a row has {len(values)} columns, its table {count}")
        values.append(None)
        row = Row._make(pick(values))
        return row._replace(payload=_bytea(row.payload)) if is_bytea else row

    return layout


def _bytea(text: bytes | None) -> bytes | None:
    if text is None:
        return None
    if not text.startswith(b"\\x"):
        raise ProtocolError("a bytea came in escape format: bytea_output should be hex in our session")
    return bytes.fromhex(text[2:].decode())


class Assembler:
    """Fed with the messages of one peek, in order. `token` is the position up to which all is published; the rows of
    such transactions are given only up to `unclean`.
    """

    def __init__(
        self,
        *,
        token: int,
        unclean: int,
        table: tuple[str, str],
        columns: ColumnNames,
        message: Callable[[bytes], Row] | None = None,
        message_prefix: str = "",
    ) -> None:
        self._token = token
        self._unclean = unclean
        self._table = table
        self._columns = columns
        self._message = message
        self._message_prefix = message_prefix
        self._layouts: dict[int, Layout] = {}
        self._piece: Piece | None = None
        # Nobody wants the rows of this transaction.
        self._passes = False

    def feed(self, messages: Iterable[bytes]) -> Iterator[Piece]:
        """The pieces of this slice; the last may go on in the next."""
        rows: list[Row] = self._piece.rows if self._piece else []
        layouts = self._layouts
        for data in messages:
            if data[0] == INSERT:
                if self._passes:
                    continue
                relation_id, values = inserted(data)
                rows.append(layouts[relation_id](values))
                continue
            found = parse(data)
            if isinstance(found, Begin):
                rows = self._begin(found)
            elif isinstance(found, Commit):
                yield self._end(found)
            elif isinstance(found, Relation):
                self._layouts[found.relation_id] = self._layout(found)
            elif isinstance(found, LogicalMessage):
                self._emitted(found, rows)
        piece = self._piece
        if piece is not None and piece.rows:
            self._piece = Piece(
                position=piece.position,
                commit_time_us=piece.commit_time_us,
                rows=[],
                is_published=piece.is_published,
            )
            yield piece

    def check_whole(self) -> None:
        """After the last slice: peeks end with a transaction's end, whatever the limit."""
        if self._piece is not None:
            raise ProtocolError("the changes ended in the middle of a transaction")

    def _begin(self, begin: Begin) -> list[Row]:
        if self._piece is not None:
            raise ProtocolError("a transaction begins inside another")
        self._piece = Piece(
            position=begin.commit_lsn,
            commit_time_us=begin.commit_time_us,
            rows=[],
            is_published=begin.commit_lsn <= self._token,
        )
        self._passes = self._piece.is_published and begin.commit_lsn > self._unclean
        return self._piece.rows

    def _end(self, commit: Commit) -> Piece:
        piece, self._piece = self._piece, None
        if piece is None or piece.position != commit.commit_lsn:
            raise ProtocolError("a transaction ends that has not begun")
        piece.end = commit.end_lsn
        return piece

    def _layout(self, relation: Relation) -> Layout:
        if (relation.schema, relation.name) != self._table:
            raise TableError(
                f"the publication also has the table {relation.schema}.{relation.name}: give the outbox a publication "
                "of its own (oncebox outbox init shows how)"
            )
        return layout_of(relation, self._columns)

    def _emitted(self, message: LogicalMessage, rows: list[Row]) -> None:
        if self._message is not None and message.is_transactional and message.prefix == self._message_prefix:
            if self._piece is None:
                raise ProtocolError("a transactional message outside of a transaction")
            if self._passes:
                return
            rows.append(self._message(message.content))
