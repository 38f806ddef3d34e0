"""From a row of the outbox to a Kafka record: topic, key, value, headers. Pure; says what is wrong with a bad row."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from relay.outbox.plan import MessageRow, Row

TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
TYPE_FIELD = "{aggregatetype}"
TOPICS_REMEMBERED_MAX = 10_000
# Written by Kafka and the coordinator only.
RESERVED = ("__", "oncebox.")
# No JSON, not even text, or nested too deep.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

# Of a JSON object, each as it was written: what is read and written anew loses digits.
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
MESSAGE_FIELDS = ("id", "aggregatetype", "aggregateid", "payload", "type", "payload_base64")

Headers = list[tuple[str, bytes | None]]


class BadRowError(Exception):
    """This row cannot be published as it is, however often it is tried."""

    def __init__(self, row: Row, reason: str) -> None:
        self.row = row
        self.reason = reason
        super().__init__(f"the row with id {_shown(row.id)} cannot be published: {reason}")


class Record(NamedTuple):
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingSettings:
    # {aggregatetype} is replaced by the row's.
    topic: str = f"outbox.event.{TYPE_FIELD}"
    id_header: str = "id"
    # The column `type` becomes this header; empty: it becomes none.
    type_header: str = "type"
    # A payload of no bytes becomes a tombstone, as NULL does.
    empty_is_tombstone: bool = False


class Mapping:
    def __init__(self, settings: MappingSettings) -> None:
        self._settings = settings
        self._topics: dict[bytes | None, str] = {}

    def record(self, row: Row) -> Record:
        settings = self._settings
        row_id, aggregatetype, aggregateid, payload, kind, headers = row
        if row_id is None:
            raise BadRowError(row, "it has no id")
        topic = self._topics.get(aggregatetype)
        if topic is None:
            topic = self.topic(row)
        found: Headers = [(settings.id_header, row_id)]
        if kind is not None and settings.type_header:
            found.append((settings.type_header, kind))
        if headers is not None:
            found += _more(row, headers)
        if not payload and settings.empty_is_tombstone:
            payload = None
        return Record(topic, aggregateid, payload, found)

    def topic(self, row: Row) -> str:
        """Where it belongs, also if something else of it is bad."""
        try:
            name = (row.aggregatetype or b"").decode()
        except UnicodeDecodeError:
            raise BadRowError(row, "its aggregatetype is not UTF-8") from None
        if TYPE_FIELD in self._settings.topic and not name:
            raise BadRowError(row, "it has no aggregatetype, which names its topic")
        topic = self._settings.topic.replace(TYPE_FIELD, name)
        if not TOPIC.fullmatch(topic) or topic in {".", ".."}:
            raise BadRowError(
                row, f"{topic[:260]!r} is no name for a topic: only letters, digits, '.', '_' and '-', at most 249"
            )
        if topic.startswith(RESERVED):
            raise BadRowError(row, f"the topic {topic} is reserved")
        if len(self._topics) < TOPICS_REMEMBERED_MAX:
            self._topics[row.aggregatetype] = topic
        return topic


def _more(row: Row, text: bytes) -> Headers:
    if text.strip() == b"null":
        return []
    try:
        return [(name, _plain(value)) for name, value in FIELDS.decode(text).items()]
    except UNREADABLE:
        raise BadRowError(row, "its headers are not a JSON object") from None


def _plain(value: msgspec.Raw | None) -> bytes | None:
    """A text without its quotes, null as nothing; anything else as it was written, to the last digit."""
    data = b"null" if value is None else bytes(value)
    if data == b"null":
        return None
    return str(msgspec.json.decode(data)).encode() if data.startswith(b'"') else data


def row_of_message(content: bytes) -> Row:
    """Of pg_logical_emit_message: a JSON object with the columns' names. The payload is text, any other JSON value, or
    as payload_base64 any bytes.
    """
    try:
        given = FIELDS.decode(content)
        plain = {name: _plain(given.get(name)) for name in MESSAGE_FIELDS}
    except UNREADABLE:
        # Without an id it is a bad row, with whatever the policy for those is.
        return MessageRow(None, None, None, content, None, None)
    headers, encoded = given.get("headers"), plain.pop("payload_base64")
    if encoded is not None:
        plain["payload"] = _decoded(encoded)
    return MessageRow(**plain, headers=None if headers is None else bytes(headers))


def _decoded(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return text


def _shown(value: bytes | None) -> str:
    return "NULL" if value is None else value[:100].decode(errors="replace")
