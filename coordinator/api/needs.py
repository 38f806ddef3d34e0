"""What each call and each message of a stream needs to be allowed: literal tables, and nothing else. Pure.

A test compares them with the .proto files, so that no method can be added without an entry.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from oncebox.access.permissions import Need, Permission

Needs = Callable[[Any], Iterable[Need]]


def _identity_alone(_request: Any) -> Iterable[Need]:
    return ()


def _admin_read(_request: Any) -> Iterable[Need]:
    return (Need(Permission.ADMIN_READ),)


def _admin_write(_request: Any) -> Iterable[Need]:
    return (Need(Permission.ADMIN_WRITE),)


def _peer(_request: Any) -> Iterable[Need]:
    return (Need(Permission.PEER),)


def _use_id(request: Any) -> Iterable[Need]:
    return (Need(Permission.USE_ID, request.transactional_id),)


def _read_id(request: Any) -> Iterable[Need]:
    return (Need(Permission.READ_ID, request.transactional_id),)


def _topics(*lists: Any) -> list[Need]:
    """Each topic once: a transaction names the same few over and over."""
    return [Need(Permission.WRITE_TOPIC, topic) for topic in {entry.topic for entries in lists for entry in entries}]


def _groups(names: Iterable[str]) -> Iterator[Need]:
    return (Need(Permission.READ_GROUP, name) for name in names)


def _add_partitions(request: Any) -> Iterator[Need]:
    yield from _use_id(request)
    yield from _topics(request.partitions)


def _add_offsets(request: Any) -> Iterator[Need]:
    yield from _use_id(request)
    yield from _groups(request.group_ids)


def _prepare(request: Any) -> Iterator[Need]:
    yield from _use_id(request)
    yield from _topics(request.contents.written)
    yield from _groups(entry.group_id for entry in request.contents.group_offsets)


def _end(request: Any) -> list[Need]:
    """Asked again of what was registered: a right may have been taken away since."""
    contents = request.contents
    needs = [Need(Permission.USE_ID, request.transactional_id), *_topics(contents.written, request.next_partitions)]
    if contents.group_offsets or request.next_group_ids:
        needs += _groups(entry.group_id for entry in contents.group_offsets)
        needs += _groups(request.next_group_ids)
    return needs


def _find_hanging(request: Any) -> Iterable[Need]:
    return _admin_write(request) if request.end else _admin_read(request)


def _commit_batch(request: Any) -> Iterator[Need]:
    yield from _use_id(request)
    yield from _topics(request.records)


def _send(request: Any) -> Iterable[Need]:
    return _topics(request.records)


def _send_offsets(request: Any) -> Iterator[Need]:
    return _groups((request.offsets.group_id,))


_COORDINATOR, _ADMIN, _PEERS, _GATEWAY = (
    f"/oncebox.v1.{name}/" for name in ("Coordinator", "Admin", "Peers", "Gateway")
)

# Every method of every service on this port. Of a stream: what opening it needs.
METHODS: Mapping[str, Needs] = {
    f"{_COORDINATOR}FindCoordinator": _read_id,
    f"{_COORDINATOR}InitProducer": _use_id,
    f"{_COORDINATOR}AddPartitions": _add_partitions,
    f"{_COORDINATOR}AddOffsets": _add_offsets,
    f"{_COORDINATOR}Prepare": _prepare,
    f"{_COORDINATOR}End": _end,
    f"{_COORDINATOR}GetOutcome": _read_id,
    f"{_COORDINATOR}Session": _identity_alone,
    f"{_ADMIN}List": _admin_read,
    f"{_ADMIN}Describe": _read_id,
    f"{_ADMIN}Abort": _admin_write,
    f"{_ADMIN}ForceFence": _admin_write,
    f"{_ADMIN}ListLeaders": _admin_read,
    f"{_ADMIN}DescribePartition": _admin_read,
    f"{_ADMIN}FindHanging": _find_hanging,
    f"{_ADMIN}WatchTransactions": _admin_read,
    f"{_PEERS}Follow": _peer,
    f"{_PEERS}ListOpen": _peer,
    f"{_GATEWAY}Transact": _identity_alone,
    f"{_GATEWAY}CommitBatch": _commit_batch,
}
# What may be asked of a coordinator: a relay's rights are asked for by the relay.
PERMISSIONS = tuple(each for each in Permission if each not in {Permission.READ_RELAY, Permission.CONTROL_RELAY})
# The messages of a session, by their name in SessionRequest.
SESSION: Mapping[str, Needs] = {
    "init_producer": _use_id,
    "add_partitions": _add_partitions,
    "add_offsets": _add_offsets,
    "prepare": _prepare,
    "end": _end,
    "get_outcome": _read_id,
    "heartbeat": _use_id,
}
# The messages of Gateway.Transact, by their name in TransactRequest; its id is asked for by `open`.
GATEWAY: Mapping[str, Needs] = {
    "open": _use_id,
    "begin": _identity_alone,
    "send": _send,
    "send_offsets": _send_offsets,
    "prepare": _identity_alone,
    "commit": _identity_alone,
    "abort": _identity_alone,
}
