"""The settings of an outbox relay: one typed model, read by oncebox.settings.load. Reads nothing by itself."""

import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, FilePath, model_validator
from pydantic_settings import SettingsConfigDict

from oncebox.channels import SecureChannel
from oncebox.session import CONNECT_TIMEOUT_MS, OpenChannel, open_plain_channel
from oncebox.settings import KafkaSection, PostgresSection, Section, ServiceSettings, is_loopback
from relay.outbox.mapping import TOPIC, TYPE_FIELD, MappingSettings
from relay.outbox.plan import ColumnNames

IDENTIFIER_BYTES = 63
Port = Annotated[int, Field(ge=0, le=65_535)]
Count = Annotated[int, Field(gt=0)]
Milliseconds = Annotated[int, Field(gt=0)]


def _identifier(name: str) -> str:
    if not name or "\x00" in name or len(name.encode(errors="replace")) > IDENTIFIER_BYTES:
        raise ValueError(f"a name in PostgreSQL has 1 to {IDENTIFIER_BYTES} bytes and no NUL")
    return name


def _slot_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,63}", name):
        raise ValueError("the name of a slot has only lower case letters, digits and _, at most 63")
    return name


def _topic_template(template: str) -> str:
    if not TOPIC.fullmatch(template.replace(TYPE_FIELD, "x")):
        raise ValueError(f"should be a topic's name; only {TYPE_FIELD} is replaced")
    return template


Identifier = Annotated[str, AfterValidator(_identifier)]
RelayName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,63}$")]


class ColumnsSection(Section):
    """How the table calls its columns."""

    # Becomes the header `id_header`.
    id: Identifier = "id"
    # Chooses the topic.
    aggregatetype: Identifier = "aggregatetype"
    # Becomes the key.
    aggregateid: Identifier = "aggregateid"
    # Becomes the value: jsonb, json, text or bytea.
    payload: Identifier = "payload"
    # Becomes the header `type_header`. Optional in the table: not there, not sent.
    type: Identifier = "type"
    # A JSON object that becomes headers. Likewise optional.
    headers: Identifier = "headers"

    def names(self) -> ColumnNames:
        return ColumnNames(**self.model_dump())


class ChannelSection(Section):
    """TLS and identity on the way to the coordinators. The fields of oncebox.SecureChannel, and mean the same."""

    # Who signs the coordinators' certificates; empty: the system's authorities.
    ca_location: FilePath | None = None
    # The relay's own, where coordinators ask for one.
    certificate_location: FilePath | None = None
    # Its key.
    key_location: FilePath | None = None
    # A file with a bearer token, read anew when it changes.
    token_location: FilePath | None = None
    # The name in the coordinators' certificates, where it is not the one in their addresses.
    server_name: str | None = None


class OutboxSettings(ServiceSettings):
    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix="ONCEBOX_OUTBOX_")

    kafka: KafkaSection
    postgres: PostgresSection
    # host:port, or several with commas between.
    coordinators: str = "localhost:7171"
    # Absent: without encryption.
    channel: ChannelSection | None = None

    # Names the relay, its row in oncebox.outbox_relay, and (as outbox-<name>) its transactional id.
    name: RelayName = "default"
    # Of the outbox table.
    table_schema: Identifier = "public"
    # The outbox table.
    table: Identifier = "outbox"
    columns: ColumnsSection = ColumnsSection()
    # logical: the write-ahead log is decoded. commit_seq: where wal_level=logical is not to be had (see the guide).
    source: Literal["logical", "commit_seq"] = "logical"
    # Made by `oncebox outbox init`, and read by this relay alone.
    slot: Annotated[str, AfterValidator(_slot_name)] = "oncebox_outbox"
    # Made by `oncebox outbox init`: the inserts of the outbox table.
    publication: Identifier = "oncebox_outbox"
    # Transactional messages of pg_logical_emit_message with this prefix are published too; empty: none.
    message_prefix: str = "outbox"

    # Where a row goes; {aggregatetype} is replaced by its own.
    topic: Annotated[str, AfterValidator(_topic_template)] = f"outbox.event.{TYPE_FIELD}"
    # The header with the row's id.
    id_header: Annotated[str, Field(min_length=1)] = "id"
    # The header with the row's type; empty: none.
    type_header: str = "type"
    # An empty payload deletes, as NULL does.
    empty_is_tombstone: bool = False

    # stop: the relay ends and says which row it is. park: its transaction, and later ones with a key of it, are kept
    # in oncebox.outbox_parked.
    bad_row: Literal["stop", "park"] = "stop"
    # Of all that are parked at a time: with more it stops.
    parked_rows_max: Count = 10_000
    # keep: rows are the service's to delete. delete: the relay does it once they are published.
    cleanup: Literal["keep", "delete"] = "keep"

    # Whole database transactions share a Kafka transaction until it holds so many rows.
    group_rows_max: Count = 10_000
    # Or so many bytes.
    group_bytes_max: Count = 8 * 1024 * 1024
    # Of one look at the slot; a transaction larger than this is still read whole.
    changes_max: Annotated[int, Field(gt=0, lt=2**31)] = 60_000
    # Rows that are fetched from the database at a time.
    slice_rows: Count = 5_000
    # Between two looks, unless there is more than one of them shows. Shorter: rows come sooner, in more transactions.
    poll_ms: Milliseconds = 5
    # While idle, the slot is moved along with the log so often.
    idle_ms: Milliseconds = 5_000
    # Enough for the largest database transaction; what a dead relay left open is aborted by the next one at once.
    transaction_timeout_ms: Milliseconds = 300_000
    # A relay that leads and has shown no sign of life for so long is put out by one that stands by.
    takeover_ms: Milliseconds = 10_000

    # A slot that keeps more of the log is told in the log of the relay, before disks fill.
    slot_warn_bytes: Count = 1024 * 1024 * 1024
    # So is a transaction that has written and stays open for longer.
    writer_warn_s: Count = 300

    # Metrics over HTTP; absent: none, 0: any free port.
    http_port: Port | None = None
    # Loopback unless asked for more: it is plain HTTP, without an identity of callers.
    http_host: str = "127.0.0.1"
    # Listening beyond this machine must be meant.
    insecure_listen: bool = False
    # Read anew on SIGHUP.
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    # One JSON object a line, with the transaction's id and number as fields; or text for people.
    log_format: Literal["text", "json"] = "text"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.source == "commit_seq" and self.table_schema == "oncebox":
            raise ValueError("the schema oncebox is the relay's own: the outbox table belongs into another")
        if self.http_port is not None and not is_loopback(self.http_host) and not self.insecure_listen:
            raise ValueError(
                f"http_host {self.http_host} is reachable from other machines over plain HTTP: listen on 127.0.0.1, "
                "or set insecure_listen if the network is trusted"
            )
        return self

    @property
    def transactional_id(self) -> str:
        return f"outbox-{self.name}"

    def opens_channels(self, connect_timeout_ms: int = CONNECT_TIMEOUT_MS) -> OpenChannel:
        if self.channel is None:
            return partial(open_plain_channel, connect_timeout_ms=connect_timeout_ms)
        given = self.channel.model_dump(exclude_none=True)
        files: dict[str, Any] = {name: str(value) for name, value in given.items()}
        return SecureChannel(connect_timeout_ms=connect_timeout_ms, **files)

    @property
    def mapping(self) -> MappingSettings:
        return MappingSettings(
            topic=self.topic,
            id_header=self.id_header,
            type_header=self.type_header,
            empty_is_tombstone=self.empty_is_tombstone,
        )
