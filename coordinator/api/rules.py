"""What a well-formed request is: names, limits, and which topics there are. Pure, but for the topics' refresh.

A request that breaks a rule is refused here, before anything else is asked or changed.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from coordinator.core.commands import ErrorCode, Refused

NAME_MAX_BYTES = 512
TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SHOWN_MAX_CHARACTERS = 80


class RequestRefusedError(Exception):
    """Inside a conversion only: carries the refusal out of it."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


class UnknownTopicsError(Exception):
    """Inside a conversion only: ask the cluster about these topics, then convert again."""

    def __init__(self, topics: Iterable[str]) -> None:
        super().__init__()
        self.topics = frozenset(topics)


class TopicsUnavailableError(Exception):
    """No broker said which topics there are."""


class TopicDeniedError(Exception):
    """Kafka does not let the coordinator see this topic."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


class Topics(Protocol):
    """The cluster's topics as last heard of."""

    def partition_count(self, topic: str, *, however_old: bool = False) -> int | None:
        """None: not known, or not heard of for too long."""

    def topic_id(self, topic: str, *, however_old: bool = False) -> bytes | None: ...

    def offsets_partition(self, group_id: str) -> int | None:
        """The partition of __consumer_offsets that holds the group's offsets."""

    async def refresh(self, topics: Collection[str]) -> None:
        """Asks the cluster. TopicsUnavailableError: nobody answered. TopicDeniedError: we may not see one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    topics: Topics
    # Written by the coordinator or by Kafka alone: nobody may lend our privilege to mark them.
    internal_topics: frozenset[str]
    transaction_timeout_max_ms: int
    partitions_max: int
    groups_max: int
    metadata_max_bytes: int
    # These have just been asked for: whichever of them is not known now does not exist.
    asked: frozenset[str] = frozenset()

    def partition_count(self, topic: str) -> int | None:
        return self.topics.partition_count(topic, however_old=topic in self.asked)

    def topic_id(self, topic: str) -> bytes | None:
        return self.topics.topic_id(topic, however_old=topic in self.asked)


def refuse(message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST, *, retriable: bool = False) -> NoReturn:
    raise RequestRefusedError(Refused(code=code, message=message, retriable=retriable))


def check_name(what: str, name: str) -> str:
    """For transactional ids, groups and instances: any text but control characters, of a length Kafka bears."""
    if not name:
        refuse(f"the {what} is empty")
    # A character takes at most four bytes: most names need no encoding to be short enough.
    if len(name) * 4 > NAME_MAX_BYTES and len(name.encode()) > NAME_MAX_BYTES:
        refuse(f"the {what} {shown(name)} is longer than {NAME_MAX_BYTES} bytes")
    if CONTROL.search(name):
        refuse(f"the {what} {shown(name)} holds a control character")
    return name


def check_topic(topic: str, internal_topics: frozenset[str]) -> None:
    if topic in internal_topics:
        refuse(
            f"{topic} is an internal topic; no transaction of a client writes to it", ErrorCode.INVALID_TOPIC_EXCEPTION
        )
    if topic in {".", ".."} or not TOPIC.fullmatch(topic):
        refuse(
            f"{shown(topic)} is no topic name: 1 to 249 letters, digits, dots, underscores and hyphens",
            ErrorCode.INVALID_TOPIC_EXCEPTION,
        )


def shown(name: str) -> str:
    """Short enough, and safe, to be told back or logged."""
    return ascii(name if len(name) <= SHOWN_MAX_CHARACTERS else name[:SHOWN_MAX_CHARACTERS] + "...")
