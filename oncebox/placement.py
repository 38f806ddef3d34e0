"""Where a record goes: the partition that its sender or the partitioner names, among those that the topic has."""

import asyncio

from oncebox.errors import BrokersUnavailableError, UnknownTopicError
from oncebox.partitioner import Partitioner
from oncebox.wire import ErrorCode, TopicPartition, Wire, WireError

# Partitions may be added to a topic: after so long it is asked for anew (as Kafka's metadata.max.age.ms).
AGE_MAX_S = 300.0
# A broker may hear of a new topic a moment later than who made it.
UNKNOWN_PAUSES_S = (0.05, 0.1)


class Placement:
    def __init__(self, wire: Wire, partitioner: Partitioner) -> None:
        self._wire = wire
        self._partitioner = partitioner
        self._places: dict[str, list[TopicPartition]] = {}

    def place(self, topic: str, key: bytes | None, partition: int | None) -> TopicPartition | None:
        """None: find() knows, or says why not."""
        places = self._places.get(topic)
        if places is None:
            return None
        if partition is None:
            partition = self._partitioner(topic, key, len(places))
        return places[partition] if 0 <= partition < len(places) else None

    async def find(self, topic: str, key: bytes | None, partition: int | None) -> TopicPartition:
        """As place(), after a look at the cluster."""
        for pause_s in (*UNKNOWN_PAUSES_S, 0.0):
            try:
                metadata = await self._wire.metadata([topic])
            except WireError as error:
                raise BrokersUnavailableError(f"the topic {topic!r} cannot be looked up: {error}") from error
            found = metadata.topics.get(topic)
            problem = found.error if found is not None else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if not problem.retriable or (found is not None and found.partitions):
                break
            await asyncio.sleep(pause_s)
        if found is None or problem is not ErrorCode.NONE or not found.partitions:
            raise UnknownTopicError(f"the topic {topic!r} cannot be written: {problem.name}; create it first")
        if topic not in self._places:
            asyncio.get_running_loop().call_later(AGE_MAX_S, self._places.pop, topic, None)
        self._places[topic] = [TopicPartition(topic, index) for index in range(len(found.partitions))]
        where = self.place(topic, key, partition)
        if where is None:
            raise UnknownTopicError(f"there is no partition {partition} in {topic!r}: it has {len(found.partitions)}")
        return where
