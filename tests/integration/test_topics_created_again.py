"""A topic that is deleted and created again, on a real broker: a late write there is never committed (R12)."""

import asyncio
import time
import uuid

import grpc
import pytest
from confluent_kafka.admin import AdminClient

from coordinator.api.topics import AGE_MAX_S
from oncebox.errors import TransactionAbortableError
from oncebox.local import LocalKafka
from oncebox.producer import Producer
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1 import transaction_pb2
from oncebox.v1.coordinator_pb2_grpc import CoordinatorStub
from oncebox.wire import ErrorCode, KafkaSettings, Record, TopicPartition, TxnMarker, Wire, encode_batch
from tests.support.coordinator import Coordinators, values
from tests.support.kafka import TopicFactory

TIMEOUT_S = 30.0


async def write(wire: Wire, grant: transaction_pb2.Grant, partition: TopicPartition, value: bytes) -> int:
    batch = encode_batch(
        [Record(key=None, value=value, timestamp_ms=time.time_ns() // 1_000_000)],
        producer_id=grant.producer_id,
        producer_epoch=grant.epoch,
        base_sequence=0,
        transactional=True,
    )
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            await wire.metadata([partition.topic])
            leader = wire.leader_id(partition)
            if leader is not None:
                answer = (await wire.produce(leader, {partition: batch}, transactional_id="any"))[partition]
                if answer.error is ErrorCode.NONE:
                    return answer.base_offset
                assert answer.error.retriable, answer
            await asyncio.sleep(0.05)


async def create_again(kafka: LocalKafka, wire: Wire, new_topic: TopicFactory, *topics: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.delete_topics(list(topics), operation_timeout=30).values():
        await asyncio.to_thread(future.result, 60)
    async with asyncio.timeout(TIMEOUT_S):
        for topic in topics:
            while (await wire.metadata([topic])).topics[topic].error is ErrorCode.NONE:  # noqa: ASYNC110 - asks a broker
                await asyncio.sleep(0.05)
            await asyncio.to_thread(new_topic, topic)
    # No coordinator believes longer than this what it heard of the old ones.
    await asyncio.sleep(AGE_MAX_S)


class Client:
    """One that makes each call by itself."""

    def __init__(self, stub: CoordinatorStub) -> None:
        self._stub = stub
        self.transactional_id = f"id-{uuid.uuid4().hex[:8]}"

    async def init(self) -> transaction_pb2.Grant:
        request = pb.InitProducerRequest(transactional_id=self.transactional_id, transaction_timeout_ms=60_000, slots=1)
        response: pb.InitProducerResponse = await self._stub.InitProducer(request, timeout=TIMEOUT_S)
        return response.grant

    async def add(self, grant: transaction_pb2.Grant, topic: str) -> transaction_pb2.Grant:
        request = pb.AddPartitionsRequest(
            transactional_id=self.transactional_id,
            grant=grant,
            partitions=[transaction_pb2.TopicPartitions(topic=topic, partitions=[0])],
        )
        response: pb.AddPartitionsResponse = await self._stub.AddPartitions(request, timeout=TIMEOUT_S)
        return response.grant

    async def end(
        self, grant: transaction_pb2.Grant, topic: str = "", offset: int | None = None
    ) -> transaction_pb2.Grant:
        """Aborts, or commits one record."""
        request = pb.EndRequest(transactional_id=self.transactional_id, grant=grant, result=transaction_pb2.ABORTED)
        if offset is not None:
            request.result = transaction_pb2.COMMITTED
            runs = [transaction_pb2.Run(offset_first=offset, offset_next=offset + 1)]
            request.contents.written.add(topic=topic, partition=0, record_count=1, runs=runs)
        response: pb.EndResponse = await self._stub.End(request, timeout=TIMEOUT_S)
        return response.next


async def test_r12_a_late_write_is_not_committed_with_the_next_transaction(
    kafka: LocalKafka, shared_coordinator: Coordinators, new_topic: TopicFactory
):
    late, straddling = TopicPartition(new_topic(), 0), TopicPartition(new_topic(), 0)
    async with (
        Wire(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as wire,
        grpc.aio.insecure_channel(shared_coordinator.addresses[0]) as channel,
        Producer(
            kafka.bootstrap_servers, shared_coordinator.addresses, transactional_id=f"id-{uuid.uuid4().hex[:8]}"
        ) as producer,
    ):
        client = Client(CoordinatorStub(channel))
        zombie = await client.add(await client.init(), late.topic)
        await write(wire, zombie, late, b"aborted")
        following = await client.end(zombie)
        assert following.producer_id == zombie.producer_id

        open_transaction = producer.transaction()
        transaction = await open_transaction.__aenter__()
        await transaction.send(straddling.topic, b"gone", partition=0)
        await transaction.flush()
        await create_again(kafka, wire, new_topic, late.topic, straddling.topic)

        # The new topic knows nothing of the epoch that is over.
        assert await write(wire, zombie, late, b"late") == 0
        grant = await client.add(following, late.topic)
        assert grant.producer_id != zombie.producer_id
        assert grant.number == following.number + 1
        await client.end(grant, late.topic, await write(wire, grant, late, b"new"))
        # What the zombie left is nobody's, and is ended as such.
        marker = TxnMarker(
            producer_id=zombie.producer_id,
            producer_epoch=zombie.epoch + 1,
            committed=False,
            partitions=(late,),
            coordinator_epoch=0,
        )
        leader = wire.leader_id(late)
        assert leader is not None
        await wire.write_txn_markers(leader, [marker])

        # Half of it is gone with the old topic: it cannot be committed, and the next one can.
        await transaction.send(straddling.topic, b"half", partition=0)
        with pytest.raises(TransactionAbortableError, match="created again"):
            await open_transaction.__aexit__(None, None, None)
        async with producer.transaction() as whole:
            await whole.send(straddling.topic, b"whole", partition=0)
    assert await asyncio.to_thread(values, kafka.bootstrap_servers, late.topic) == [b"new"]
    assert await asyncio.to_thread(values, kafka.bootstrap_servers, straddling.topic) == [b"whole"]
