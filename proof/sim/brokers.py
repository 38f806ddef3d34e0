"""What the marker writer asks of Kafka, on simulated brokers: each instance has its own, maybe old, idea of leaders."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from oncebox import wire
from proof.sim.cluster import Cluster
from proof.sim.network import NoAnswerError


class SimBrokers:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._leaders: dict[wire.TopicPartition, int] = {}

    @property
    def brokers(self) -> Mapping[int, Any]:
        return MappingProxyType(dict.fromkeys(self._cluster.nodes))

    def leader_id(self, partition: wire.TopicPartition) -> int | None:
        return self._leaders.get(partition)

    async def metadata(self, topics: Collection[str] | None, *, timeout_ms: int) -> wire.ClusterMetadata:
        """Of what it returns only the topics' ids are read: `leader_id` knows the leaders."""
        try:
            self._leaders, topic_ids = await self._cluster.metadata(timeout_s=timeout_ms / 1000)
        except NoAnswerError as error:
            raise wire.OutcomeUnknownError(str(error)) from error
        told = {
            topic: wire.TopicMetadata(
                error=wire.ErrorCode.NONE if topic in topic_ids else wire.ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                topic_id=topic_ids.get(topic),
                is_internal=False,
                partitions={},
            )
            for topic in topics or ()
        }
        return wire.ClusterMetadata(cluster_id=None, controller_id=None, brokers={}, topics=told)

    async def write_txn_markers(
        self, node_id: int, markers: Sequence[wire.TxnMarker], *, timeout_ms: int, lane: str
    ) -> dict[int, dict[wire.TopicPartition, wire.ErrorCode]]:
        del lane
        try:
            return await self._cluster.write_markers(node_id, markers, timeout_s=timeout_ms / 1000)
        except NoAnswerError as error:
            raise wire.OutcomeUnknownError(str(error)) from error

    async def describe_producers(
        self, node_id: int, partitions: Iterable[wire.TopicPartition], *, timeout_ms: int, lane: str
    ) -> dict[wire.TopicPartition, wire.PartitionProducers]:
        del lane
        try:
            return await self._cluster.describe_producers(node_id, partitions, timeout_s=timeout_ms / 1000)
        except NoAnswerError as error:
            raise wire.OutcomeUnknownError(str(error)) from error
