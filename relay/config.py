"""The relay's settings: one typed model, read by oncebox.settings.load from a YAML file, variables and flags.

The vocabulary of JDBC sinks where it fits. Reads nothing by itself; what a table really looks like is asked later.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, FilePath, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from oncebox.settings import (
    KafkaSection,
    PostgresSection,
    Section,
    ServerTlsSection,
    ServiceSettings,
    TokensSection,
    check_listening,
)
from relay.types import Format, InsertMode, TableName, TimeUnit

IDENTIFIER_BYTES = 63
GUARD_COLUMNS = ("oncebox_source", "oncebox_offset")
GUARD_TYPES = ("integer", "bigint")
ORDERING_COLUMN = "oncebox_ordering"
TEMPLATE = "{topic}"

Port = Annotated[int, Field(ge=0, le=65_535)]
Count = Annotated[int, Field(gt=0)]
Partition = Annotated[int, Field(ge=0)]
Offset = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[int, Field(gt=0)]
TopicName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
Start = Literal["earliest", "latest"] | datetime | dict[TopicName, dict[Partition, Offset]]


def _identifier(name: str) -> str:
    if not name or "\x00" in name or len(name.encode(errors="replace")) > IDENTIFIER_BYTES:
        raise ValueError(f"a name in PostgreSQL has 1 to {IDENTIFIER_BYTES} bytes and no NUL")
    return name


Identifier = Annotated[str, AfterValidator(_identifier)]


class ColumnSection(Section):
    """A column: where its value comes from. `path` is a dotted path in the value, or @key, @key.path, @topic,
    @partition, @offset, @timestamp, @header.name.
    """

    # PostgreSQL's name of it; absent: as the table has it.
    type: str | None = None
    # Absent: the field that has the column's name.
    path: str | None = None
    # Of a number that stands for a time.
    unit: TimeUnit | None = None


class TableSection(Section):
    """One topic's way into one table. A topic may have several."""

    # Taken whole, all its partitions.
    topic: TopicName
    # "table" or "schema.table"; {topic} stands for the topic's name.
    table: str = TEMPLATE
    # debezium: the envelope, with or without its schema.
    format: Format = "json"
    # upsert: one row for each key. insert: one for each record.
    insert_mode: InsertMode = "upsert"
    # The columns that tell rows apart; an upsert needs them, with a primary key or unique constraint on them.
    key: tuple[Identifier, ...] = ()
    # A type or a whole section for each; without it: the columns of the table, each from the field of its name.
    columns: dict[Identifier, ColumnSection] = Field(default_factory=dict)
    # Fields to take, where `columns` is not given; empty: all.
    include: frozenset[str] = frozenset()
    # Fields to leave out, where `columns` is not given.
    exclude: frozenset[str] = frozenset()
    # A record without a value deletes the row that its key names.
    delete_on_tombstone: bool = True
    # Creates the table if it is missing; needs `columns` with types.
    auto_create: bool = False
    # Adds columns for new fields, and widens integers; never drops or narrows.
    auto_evolve: bool = False
    # Rows remember the record that wrote them, in two columns: an older one never overwrites them.
    guard: bool = True
    # A column that says which of two records of a row is newer, whatever their topics.
    ordering: Identifier | None = None

    @field_validator("columns", mode="before")
    @classmethod
    def _types(cls, columns: Any) -> Any:
        if isinstance(columns, dict):
            return {name: {"type": each} if isinstance(each, str) else each or {} for name, each in columns.items()}
        return columns

    @field_validator("key", mode="before")
    @classmethod
    def _one_key(cls, key: Any) -> Any:
        return (key,) if isinstance(key, str) else key

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.insert_mode == "upsert" and not self.key:
            raise ValueError("an upsert needs `key`: the columns that tell rows apart")
        if self.columns and (self.include or self.exclude):
            raise ValueError("`include` and `exclude` are for tables without `columns`")
        for name in self.key:
            if self.columns and name not in self.columns:
                raise ValueError(f"the key column {name!r} is not among `columns`")
        for name in (*self.columns, *self.key):
            if name in {*GUARD_COLUMNS, ORDERING_COLUMN}:
                raise ValueError(f"{name} is the version guard's own column")
        if self.ordering is not None:
            if self.insert_mode != "upsert" or not self.guard:
                raise ValueError("`ordering` is for upserts with the guard: else nothing remembers it")
            if self.columns and self.ordering not in self.columns:
                raise ValueError(f"the ordering column {self.ordering!r} is not among `columns`")
        self.target()
        return self

    @property
    def own_columns(self) -> dict[str, str]:
        """The relay's own in the table, with their types."""
        own = dict(zip(GUARD_COLUMNS, GUARD_TYPES, strict=True)) if self.guard else {}
        return own if self.ordering is None else own | {ORDERING_COLUMN: "bigint"}

    def target(self) -> TableName:
        parts = re.findall(r"[^.]+", self.table)
        if not 1 <= len(parts) <= 2:
            raise ValueError(f"table {self.table!r} should be table or schema.table")
        names = [_identifier(part.replace(TEMPLATE, self.topic)) for part in parts]
        return TableName(schema=names[0] if len(names) == 2 else "public", name=names[-1])


class Limits(Section):
    """What one batch, one record and what waits may take."""

    # One database transaction takes as many rows as are there, up to so many.
    batch_rows: Count = 20_000
    # And up to so many bytes of them.
    batch_bytes: Count = 16 * 1024 * 1024
    # A record over this is bad. (Kafka has limits of its own.)
    record_bytes: Count = 8 * 1024 * 1024
    # Transactions wait in memory up to this; a larger one waits in the database, and is still applied whole.
    buffer_bytes: Count = 64 * 1024 * 1024
    # Dead letters that are not resolved: beyond it the relay stops instead of parking more.
    dead_letters: Count = 10_000


class RelaySettings(ServiceSettings):
    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix="ONCEBOX_RELAY_")

    # Names the positions in the database: another name begins anew.
    name: Identifier
    # transaction: whole, by one process, the others stand by. partition: any topic, shared among all processes.
    mode: Literal["transaction", "partition"] = "transaction"
    kafka: KafkaSection
    postgres: PostgresSection
    tables: Annotated[list[TableSection], Field(min_length=1)]
    limits: Limits = Limits()

    # Where a topic begins that has no position yet: earliest, latest, a time, or {topic: {partition: offset}}, up to
    # which the tables hold its data already (topics that are not named there begin with their earliest record).
    start: Start = "earliest"
    # A bad record: stop, park (it and what comes after it on its rows goes to oncebox.dead_letter) or skip.
    on_error: Literal["stop", "park", "skip"] = "stop"
    # Of the coordinators, read in transaction mode.
    feed_topic: TopicName = "oncebox.commits"

    # A process that has given no sign of life for so long is taken for dead.
    session_ms: Annotated[int, Field(ge=1_000)] = 10_000
    # What fails is tried again after pauses that grow up to this.
    retry_max_ms: Milliseconds = 5_000
    # A statement that takes longer is given up and tried again.
    statement_timeout_ms: Milliseconds = 300_000

    # Status and control over gRPC; /live, /ready and /metrics over HTTP.
    listen_host: str = "127.0.0.1"
    # For gRPC; 0: any free one.
    listen_port: Port = 7181
    # For HTTP; 0: any free one.
    http_port: Port = 7182
    # Absent: calls are not encrypted and nobody is asked who it is, on this machine alone.
    tls: ServerTlsSection | None = None
    tokens: TokensSection | None = None
    # Who may ask for the status, and who may pause and resume: a YAML file, read anew on SIGHUP. Without it everybody
    # who is let in may do both.
    rules_location: FilePath | None = None
    # Without TLS and an identity of callers, listening beyond this machine must be meant.
    insecure_listen: bool = False
    # Read anew on SIGHUP.
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    # One JSON object a line, with the transaction's id and number as fields; or text for people.
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_listening(self)
        if isinstance(self.start, dict) and (unknown := self.start.keys() - set(self.topics)):
            raise ValueError(f"start names {min(unknown)}, which no table takes")
        seen: dict[tuple[str, TableName], int] = {}
        fed: dict[TableName, TableSection] = {}
        for index, each in enumerate(self.tables):
            target = each.target()
            if (each.topic, target) in seen:
                raise ValueError(f"tables.{index}: {each.topic} goes into {target} already")
            seen[each.topic, target] = index
            first = fed.setdefault(target, each)
            if first is each or (each.insert_mode == "insert" and first.ordering is None):
                continue
            if each.ordering is None or first.ordering is None:
                raise ValueError(
                    f"tables.{index}: {target} is fed by {first.topic} too, and nothing says which of two records "
                    "of one row is newer: name an `ordering` column for both, or use a table for each topic"
                )
            if (each.ordering, each.key) != (first.ordering, first.key):
                raise ValueError(f"tables.{index}: {target} has another `ordering` or `key` for {first.topic}")
        return self

    @property
    def topics(self) -> list[str]:
        return list(dict.fromkeys(each.topic for each in self.tables))


def config_hash(settings: RelaySettings) -> str:
    """Of all that decides what the rows look like."""
    text = "\n".join(each.model_dump_json() for each in settings.tables)
    return hashlib.sha256(f"{settings.mode}\n{text}".encode()).hexdigest()[:16]
