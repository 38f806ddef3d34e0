"""Requests of clients as commands of the core. Pure: checks form and limits, asks nobody, changes nothing.

Raises RequestRefusedError for what is malformed and UnknownTopicsError where the cluster must be asked first.
On the path of every transaction: kept lean.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from coordinator.api.rules import Rules, UnknownTopicsError, check_name, check_topic, refuse, shown
from coordinator.core.commands import (
    End,
    ErrorCode,
    GetOutcome,
    Heartbeat,
    InitProducer,
    Prepare,
    Register,
)
from coordinator.core.records import (
    NOTHING,
    OFFSETS_TOPIC,
    Contents,
    Grant,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    Result,
    Run,
    TopicPartition,
    Written,
)
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2

SLOTS_DEFAULT = 2
SLOTS_MAX = 4
TOPIC_ID_BYTES = 16
# As Kafka's offset.metadata.max.bytes.
OFFSET_METADATA_MAX_BYTES = 4_096

_RESULTS = {
    transaction_pb2.COMMITTED: Result.COMMITTED,
    transaction_pb2.ABORTED: Result.ABORTED,
}


def init_producer(request: pb.InitProducerRequest, rules: Rules, address: str) -> InitProducer:
    transactional_id = check_name("transactional id", request.transactional_id)
    timeout_ms = request.transaction_timeout_ms
    if not 0 < timeout_ms <= rules.transaction_timeout_max_ms:
        refuse(
            f"a transaction timeout of {timeout_ms} ms is not between 1 and {rules.transaction_timeout_max_ms}",
            ErrorCode.INVALID_TRANSACTION_TIMEOUT,
        )
    slots = request.slots
    if not 0 <= slots <= SLOTS_MAX:
        refuse(f"{slots} slots are not possible: 1 to {SLOTS_MAX}, or 0 for the default of {SLOTS_DEFAULT}")
    return InitProducer(
        transactional_id=transactional_id,
        instance=check_name("instance", request.instance) if request.instance else "",
        address=address,
        transaction_timeout_ms=timeout_ms,
        grant=_grant(request) if request.HasField("grant") else None,
        without_waiting=request.without_waiting,
        keep_prepared=request.keep_prepared,
        slots_max=slots or SLOTS_DEFAULT,
    )


def add_partitions(request: pb.AddPartitionsRequest, rules: Rules, _address: str) -> Register:
    transactional_id = check_name("transactional id", request.transactional_id)
    grant = _grant(request)
    begun_ms_ago = _begun_ms_ago(request)
    partitions, unknown = _partitions(request.partitions, rules)
    if unknown:
        _ask_for({partition.topic for partition in unknown}, rules)
        refuse(
            f"{unknown[0].topic}:{unknown[0].partition} does not exist",
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            retriable=True,
        )
    if not partitions:
        refuse("no partition is named")
    return Register(
        transactional_id=transactional_id,
        grant=grant,
        partitions=partitions,
        begun_ms_ago=begun_ms_ago,
        topic_ids=_topic_ids((entry.topic for entry in request.partitions), rules),
    )


def add_offsets(request: pb.AddOffsetsRequest, rules: Rules, _address: str) -> Register:
    transactional_id = check_name("transactional id", request.transactional_id)
    grant = _grant(request)
    begun_ms_ago = _begun_ms_ago(request)
    groups = _groups(request.group_ids, rules)
    if groups is None:
        refuse(
            f"the cluster has no {OFFSETS_TOPIC} yet; send the call again",
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
            retriable=True,
        )
    if not groups:
        refuse("no group is named")
    return Register(transactional_id=transactional_id, grant=grant, groups=groups, begun_ms_ago=begun_ms_ago)


def prepare(request: pb.PrepareRequest, rules: Rules, _address: str) -> Prepare:
    # First: all topics of a request are asked for together.
    topic_ids = _topic_ids((entry.topic for entry in request.contents.written if entry.record_count), rules)
    return Prepare(
        transactional_id=check_name("transactional id", request.transactional_id),
        grant=_grant(request),
        contents=_contents(request.contents, rules),
        topic_ids=topic_ids,
    )


def end(request: pb.EndRequest, rules: Rules, _address: str) -> End:
    """A chain onto partitions that do not exist is left out: it must not keep the transaction from its end."""
    transactional_id = check_name("transactional id", request.transactional_id)
    grant = _grant(request)
    result = _RESULTS.get(request.result)
    if result is None:
        refuse("the result must be COMMITTED or ABORTED")
    wait = request.wait
    if wait not in {pb.EndRequest.COMPLETE, pb.EndRequest.DECIDED}:
        refuse(f"there is no level {wait} to wait for")
    contents = NOTHING
    # First: all topics of a request are asked for together.
    named = [entry.topic for entry in request.contents.written if entry.record_count]
    topic_ids = _topic_ids([*named, *(entry.topic for entry in request.next_partitions)], rules)
    if request.HasField("contents"):
        contents = _contents(request.contents, rules)
        if result is Result.ABORTED and contents != NOTHING:
            refuse("an abort holds no contents")
    next_partitions, next_groups = _chain(request, rules)
    return End(
        transactional_id=transactional_id,
        grant=grant,
        result=result,
        contents=contents,
        decided_is_enough=wait == pb.EndRequest.DECIDED,
        next_partitions=next_partitions,
        next_groups=next_groups,
        topic_ids=topic_ids,
    )


def _chain(request: pb.EndRequest, rules: Rules) -> tuple[frozenset[TopicPartition], frozenset[GroupPartition]]:
    """All of it or nothing."""
    partitions: frozenset[TopicPartition] = frozenset()
    groups: frozenset[GroupPartition] | None = frozenset()
    if request.next_partitions:
        partitions, unknown = _partitions(request.next_partitions, rules)
        if unknown:
            _ask_for({partition.topic for partition in unknown}, rules)
            return frozenset(), frozenset()
    if request.next_group_ids:
        groups = _groups(request.next_group_ids, rules)
    return (partitions, groups) if groups is not None else (frozenset(), frozenset())


def get_outcome(request: pb.GetOutcomeRequest, _rules: Rules, _address: str) -> GetOutcome:
    return GetOutcome(
        transactional_id=check_name("transactional id", request.transactional_id), number=check_number(request.number)
    )


def heartbeat(request: pb.Heartbeat, _rules: Rules, _address: str) -> Heartbeat:
    return Heartbeat(
        transactional_id=check_name("transactional id", request.transactional_id),
        grant=_grant(request),
        begun_ms_ago=_begun_ms_ago(request),
        extend=request.extend,
    )


def check_number(number: int) -> int:
    if number < 1:
        refuse(f"{number} is no transaction's number: they count from 1")
    return number


def _grant(request: Any) -> Grant:
    if not request.HasField("grant"):
        refuse("the grant is missing")
    message = request.grant
    number = check_number(message.number)
    producer_id = message.producer_id
    epoch = message.epoch
    if producer_id < 0 or epoch < 0:
        refuse(f"a grant has no negative producer id or epoch ({producer_id}, {epoch})")
    return Grant(number=number, producer_id=producer_id, epoch=epoch)


def _begun_ms_ago(request: Any) -> int | None:
    if not request.HasField("begun_ms_ago"):
        return None
    begun_ms_ago: int = request.begun_ms_ago
    if begun_ms_ago < 0:
        refuse(f"a transaction cannot have begun {begun_ms_ago} ms ago")
    return begun_ms_ago


def _partitions(
    entries: Iterable[transaction_pb2.TopicPartitions], rules: Rules
) -> tuple[frozenset[TopicPartition], list[TopicPartition]]:
    """All that are named, and those of them that the cluster is not known to have."""
    found: list[TopicPartition] = []
    unknown: list[TopicPartition] = []
    for entry in entries:
        topic = entry.topic
        count = rules.partition_count(topic)
        if count is None or topic in rules.internal_topics:
            check_topic(topic, rules.internal_topics)
            count = 0
        before = len(found)
        for partition in entry.partitions:
            if partition < 0:
                refuse(f"{topic} has no partition {partition}")
            found.append(TopicPartition(topic, partition))
            if partition >= count:
                unknown.append(found[-1])
        if len(found) == before:
            refuse(f"no partition of {topic} is named")
    if len(found) > rules.partitions_max:
        refuse(f"{len(found)} partitions in one call; at most {rules.partitions_max} are possible")
    return frozenset(found), unknown


def _topic_ids(topics: Iterable[str], rules: Rules) -> dict[str, bytes]:
    """Whatever the client says: which topics these names stand for just now; an empty id: none."""
    found: dict[str, bytes] = {}
    unknown: set[str] = set()
    for topic in topics:
        if topic not in found:
            topic_id = rules.topic_id(topic)
            if topic_id is None:
                check_topic(topic, rules.internal_topics)
                unknown.add(topic)
            found[topic] = topic_id or b""
    if unknown:
        _ask_for(unknown, rules)
    return found


def _ask_for(unknown: AbstractSet[str], rules: Rules) -> None:
    """Returns where all of them have just been asked for: then they do not exist."""
    if unknown - rules.asked:
        raise UnknownTopicsError(unknown - rules.asked)


def _groups(group_ids: Sequence[str], rules: Rules) -> frozenset[GroupPartition] | None:
    """None: there is no offsets topic yet."""
    if len(group_ids) > rules.groups_max:
        refuse(f"{len(group_ids)} groups in one call; at most {rules.groups_max} are possible")
    groups = []
    for group_id in group_ids:
        check_name("group id", group_id)
        partition = rules.topics.offsets_partition(group_id)
        if partition is None:
            _ask_for({OFFSETS_TOPIC}, rules)
            return None
        groups.append(GroupPartition(group_id, partition))
    return frozenset(groups)


def _contents(message: pb.Contents, rules: Rules) -> Contents:
    """Whether all of it was registered, and whether runs and counts agree, the core checks against its state."""
    metadata = message.metadata
    if len(metadata) > rules.metadata_max_bytes:
        refuse(
            f"{len(metadata)} bytes of metadata; at most {rules.metadata_max_bytes} are possible",
            ErrorCode.MESSAGE_TOO_LARGE,
        )
    if len(message.written) > rules.partitions_max:
        refuse(f"{len(message.written)} partitions are written; at most {rules.partitions_max} are possible")
    written = tuple([_written(entry, rules) for entry in message.written])
    group_offsets: tuple[GroupOffsets, ...] = ()
    if message.group_offsets:
        group_offsets = _all_group_offsets(message.group_offsets, rules)
    return Contents(written=written, group_offsets=group_offsets, metadata=metadata)


def _written(entry: transaction_pb2.Written, rules: Rules) -> Written:
    topic = entry.topic
    topic_id = entry.topic_id
    if not topic_id:
        known = rules.topic_id(topic)
        if known is None:
            check_topic(topic, rules.internal_topics)
            _ask_for({topic}, rules)
        # A topic deleted since: the transaction still ends, its records are gone with the topic.
        topic_id = known or b""
    elif len(topic_id) != TOPIC_ID_BYTES:
        refuse(f"the topic id of {shown(topic)} has {len(topic_id)} bytes, not {TOPIC_ID_BYTES}")
    return Written(
        topic=topic,
        partition=entry.partition,
        record_count=entry.record_count,
        runs=tuple([Run(run.offset_first, run.offset_next) for run in entry.runs]),
        topic_id=topic_id,
    )


def _all_group_offsets(entries: Sequence[transaction_pb2.GroupOffsets], rules: Rules) -> tuple[GroupOffsets, ...]:
    if len(entries) > rules.groups_max:
        refuse(f"offsets of {len(entries)} groups; at most {rules.groups_max} are possible")
    if len({entry.group_id for entry in entries}) != len(entries):
        refuse("the offsets of a group are named twice")
    if sum(len(entry.offsets) for entry in entries) > rules.partitions_max:
        refuse(f"more than {rules.partitions_max} group offsets in one call")
    return tuple([_group_offsets(entry) for entry in entries])


def _group_offsets(entry: transaction_pb2.GroupOffsets) -> GroupOffsets:
    group_id = check_name("group id", entry.group_id)
    offsets = tuple(
        [
            GroupOffset(
                topic=offset.topic, partition=offset.partition, offset_next=offset.offset_next, metadata=offset.metadata
            )
            for offset in entry.offsets
        ]
    )
    if len({(offset.topic, offset.partition) for offset in offsets}) != len(offsets):
        refuse(f"the group {shown(group_id)} names a partition twice")
    for offset in offsets:
        # Offsets may be of any topic, internal ones too: only their form is checked.
        check_topic(offset.topic, frozenset())
        if offset.partition < 0 or offset.offset_next < 0:
            refuse(f"the group {shown(group_id)} has a negative partition or offset")
        if len(offset.metadata.encode()) > OFFSET_METADATA_MAX_BYTES:
            refuse(
                f"an offset of the group {shown(group_id)} has over {OFFSET_METADATA_MAX_BYTES} bytes of metadata",
                ErrorCode.MESSAGE_TOO_LARGE,
            )
    return GroupOffsets(group_id=group_id, offsets=offsets)
