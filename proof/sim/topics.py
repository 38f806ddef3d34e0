"""What the API adds to a client's call: which topics its names stand for just now. Here it knows at once."""

from msgspec.structs import replace

from coordinator.core.commands import Command, End, ErrorCode, Prepare, Refused, Register
from coordinator.core.records import Contents, TopicPartition
from proof.sim.cluster import Cluster


def with_topic_ids(command: Command, cluster: Cluster) -> Command | Refused:
    match command:
        case Register():
            missing = [partition for partition in command.partitions if partition.topic not in cluster.topic_ids]
            if missing:
                return Refused(
                    code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message=f"{missing[0]} does not exist", retriable=True
                )
            return replace(command, topic_ids=_ids(command.partitions, cluster))
        case Prepare(contents=contents):
            ids = _ids(_written(contents), cluster)
            return replace(command, contents=_filled(contents, ids), topic_ids=ids)
        case End(contents=contents):
            ids = _ids(_written(contents), cluster)
            command = replace(command, contents=_filled(contents, ids))
            if any(partition.topic not in cluster.topic_ids for partition in command.next_partitions):
                return replace(command, topic_ids=ids, next_partitions=frozenset(), next_groups=frozenset())
            return replace(command, topic_ids=ids | _ids(command.next_partitions, cluster))
        case _:
            return command


def _written(contents: Contents) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(entry.topic, entry.partition) for entry in contents.written)


def _ids(partitions: frozenset[TopicPartition], cluster: Cluster) -> dict[str, bytes]:
    ids = {partition.topic: cluster.topic_ids.get(partition.topic) for partition in partitions}
    return {topic: topic_id.bytes if topic_id else b"" for topic, topic_id in ids.items()}


def _filled(contents: Contents, ids: dict[str, bytes]) -> Contents:
    return replace(contents, written=tuple(replace(entry, topic_id=ids[entry.topic]) for entry in contents.written))
