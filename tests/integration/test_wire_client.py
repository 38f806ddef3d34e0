"""How the wire behaves: lanes, deadlines, lost connections, leaders that move, who is let in."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.wire import (
    LATEST,
    AuthenticationError,
    ErrorCode,
    KafkaSettings,
    OutcomeUnknownError,
    Record,
    TopicPartition,
    TxnMarker,
    Wire,
    encode_batch,
)
from proof.faults.proxy import Proxy
from tests.integration.test_wire_transactions import Talker, committed_values, know, leader, new_producer_id, until
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.support.kafka import TopicFactory

    NewLoop = Callable[[], asyncio.AbstractEventLoop]

NONE = ErrorCode.NONE
both_loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def settings_of(kafka: LocalKafka) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)


def batch(sequence: int, *, producer_id: int = 2**62, epoch: int = 0) -> bytes:
    return encode_batch(
        [Record(key=None, value=b"%d" % sequence)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=False,
    )


def connection_of(wire: Wire, node_id: int, lane: str) -> Any:
    return wire._connections._lanes[node_id, lane].connection


@pytest.fixture
async def wire(kafka: LocalKafka) -> AsyncIterator[Wire]:
    async with Wire(settings_of(kafka)) as wire:
        yield wire


@pytest.fixture
async def partition(wire: Wire, new_topic: TopicFactory) -> TopicPartition:
    return (await know(wire, new_topic()))[0]


async def test_metadata_tells_topic_ids(kafka: LocalKafka, wire: Wire, partition: TopicPartition) -> None:
    topic = (await wire.metadata([partition.topic])).topics[partition.topic]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    described: Any = admin.describe_topics(TopicCollection([partition.topic]))[partition.topic].result(30)
    expected = described.topic_id
    assert topic.topic_id is not None
    assert topic.topic_id.int >> 64 == expected.get_most_significant_bits() % 2**64
    assert topic.topic_id.int % 2**64 == expected.get_least_significant_bits() % 2**64
    # Deleted and made again under its name it is another topic.
    admin.delete_topics([partition.topic])[partition.topic].result(30)
    await until(lambda: wire.metadata([partition.topic]), lambda answer: answer.topics[partition.topic].error)
    assert wire.leader_id(partition) is None
    create_topic(kafka.bootstrap_servers, partition.topic)
    await know(wire, partition.topic)
    again = (await wire.metadata([partition.topic])).topics[partition.topic]
    assert again.topic_id not in {None, topic.topic_id}


async def test_asking_for_a_topic_does_not_create_it(wire: Wire, topic_name: str) -> None:
    answer = await wire.metadata([topic_name])
    assert answer.topics[topic_name].error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert topic_name not in (await wire.metadata(None)).topics
    assert wire.leader_id(TopicPartition(topic_name, 0)) is None


async def test_a_refusal_is_a_value_and_the_others_are_carried_out(
    wire: Wire, partition: TopicPartition, topic_name: str
) -> None:
    missing = TopicPartition(topic_name, 0)
    node_id = leader(wire, partition)
    answer = await wire.produce(node_id, {missing: batch(0), partition: batch(0)})
    assert answer[missing].error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert answer[partition].error is NONE
    offsets = await wire.list_offsets(node_id, {missing: LATEST, partition: LATEST})
    assert offsets[missing].error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert offsets[partition].offset == 1
    marker = TxnMarker(
        producer_id=2**62, producer_epoch=1, committed=True, partitions=(missing, partition), coordinator_epoch=0
    )
    marked = await wire.write_txn_markers(node_id, [marker])
    assert marked == {2**62: {missing: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, partition: NONE}}


async def test_a_batch_that_is_too_large_is_refused_by_name(wire: Wire, new_topic: TopicFactory) -> None:
    (partition,) = await know(wire, new_topic(config={"max.message.bytes": "1000"}))
    large = encode_batch(
        [Record(key=None, value=b"x" * 2000)], producer_id=1, producer_epoch=0, base_sequence=0, transactional=False
    )
    answer = await wire.produce(leader(wire, partition), {partition: large})
    assert answer[partition].error is ErrorCode.MESSAGE_TOO_LARGE


async def test_requests_leave_in_call_order_from_the_first_on_a_new_connection(
    wire: Wire, partition: TopicPartition
) -> None:
    node_id = leader(wire, partition)
    for start in (0, 5):
        answers = await asyncio.gather(
            *(wire.produce(node_id, {partition: batch(start + number)}, lane="fresh") for number in range(5))
        )
        assert [answer[partition].error for answer in answers] == [NONE] * 5
        assert [answer[partition].base_offset for answer in answers] == list(range(start, start + 5))


async def test_requests_that_wait_for_the_connection_are_not_overtaken_once_it_is_open(
    wire: Wire, partition: TopicPartition
) -> None:
    node_id = leader(wire, partition)

    def produce(sequence: int) -> asyncio.Future[Any]:
        return wire.produce(node_id, {partition: batch(sequence)}, lane="fresh")

    asked = [produce(sequence) for sequence in range(10)]
    await asyncio.sleep(0)  # one step: they wait
    while connection_of(wire, node_id, "fresh") is None:  # noqa: ASYNC110  # the very step in which it is there
        await asyncio.sleep(0)
    for _ in range(10):  # one in each of the steps in which the others leave
        asked.append(produce(len(asked)))
        await asyncio.sleep(0)
    answers = await asyncio.gather(*asked)
    assert [answer[partition].error for answer in answers] == [NONE] * 20
    assert [answer[partition].base_offset for answer in answers] == list(range(20))


async def test_an_idle_connection_closes_and_the_next_request_opens_another(
    kafka: LocalKafka, partition: TopicPartition
) -> None:
    settings = dataclasses.replace(settings_of(kafka), connections_max_idle_ms=1_000)
    async with Wire(settings) as wire:
        (node_id,) = wire.brokers
        for sequence in range(2):
            answer = await wire.produce(node_id, {partition: batch(sequence)}, lane="x")
            assert answer[partition].error is NONE
            await connection_of(wire, node_id, "x").closed


async def test_each_lane_is_a_connection_of_its_own_that_does_not_delay_small_writes(
    wire: Wire, partition: TopicPartition
) -> None:
    node_id = leader(wire, partition)
    await asyncio.gather(*(wire.list_offsets(node_id, {partition: LATEST}, lane=lane) for lane in "aabb"))
    sockets = [connection_of(wire, node_id, lane)._transport.get_extra_info("socket") for lane in "ab"]
    assert sockets[0].getsockname() != sockets[1].getsockname()
    assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)


async def test_a_caller_that_gives_up_leaves_the_lane_in_order(wire: Wire, partition: TopicPartition) -> None:
    node_id = leader(wire, partition)
    await wire.list_offsets(node_id, {partition: LATEST}, lane="x")
    connection = connection_of(wire, node_id, "x")
    given_up = wire.produce(node_id, {partition: batch(0)}, lane="x")
    given_up.cancel()
    answer = await wire.produce(node_id, {partition: batch(1)}, lane="x")
    assert given_up.cancelled()
    assert (answer[partition].error, answer[partition].base_offset) == (NONE, 1)
    assert connection_of(wire, node_id, "x") is connection


async def test_a_broker_that_is_not_known_is_not_asked(wire: Wire, partition: TopicPartition) -> None:
    with pytest.raises(OutcomeUnknownError, match="broker 99 is not in the metadata"):
        await wire.produce(99, {partition: batch(0)})


def through(proxy: Proxy, wire: Wire) -> int:
    """From now on this wire's new connections to the only broker lead through the proxy; returns the broker's id."""
    ((node_id, broker),) = wire.brokers.items()
    wire._connections.brokers = {node_id: dataclasses.replace(broker, port=proxy.port)}
    return node_id


@both_loops
def test_a_connection_that_breaks_is_an_unknown_outcome_and_the_next_request_gets_a_new_one(
    kafka: LocalKafka, new_topic: TopicFactory, new_loop: NewLoop
) -> None:
    """On both event loops in use, which tell it in different words, and at every moment around the break."""
    topic = new_topic()

    async def run() -> None:
        async with Wire(settings_of(kafka)) as wire, Proxy(("127.0.0.1", kafka.brokers[0].port)) as proxy:
            (partition,) = await know(wire, topic)
            node_id = through(proxy, wire)
            for _ in range(5):
                assert (await wire.list_offsets(node_id, {partition: LATEST}, lane="x"))[partition].error is NONE
                cutting = asyncio.create_task(proxy.cut())
                asked = []
                while not cutting.done():
                    asked.append(asyncio.create_task(wire.list_offsets(node_id, {partition: LATEST}, lane="x")))
                    await asyncio.sleep(0)
                answers = await asyncio.gather(*asked, return_exceptions=True)
                failed = [answer for answer in answers if isinstance(answer, BaseException)]
                assert failed
                assert all(isinstance(answer, OutcomeUnknownError) for answer in failed)
                await proxy.heal()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


async def test_what_was_done_but_not_answered_is_found_done_by_repeating_it(
    kafka: LocalKafka, wire: Wire, partition: TopicPartition
) -> None:
    async with Proxy(("127.0.0.1", kafka.brokers[0].port), kafka=True) as proxy:
        node_id = through(proxy, wire)
        assert (await wire.produce(node_id, {partition: batch(0)}))[partition].base_offset == 0
        swallowed = proxy.swallow_reply(0)
        following = wire.produce(node_id, {partition: batch(1)}, timeout_ms=500)
        await asyncio.sleep(0)
        with pytest.raises(OutcomeUnknownError, match="overdue"):  # the other's deadline closes both
            await wire.produce(node_id, {partition: batch(2)})
        with pytest.raises(OutcomeUnknownError, match="no answer within 500 ms"):
            await following
        await swallowed.reply()  # a busy broker may do it later than that
        assert (await wire.list_offsets(node_id, {partition: LATEST}))[partition].offset > 1
        assert (await wire.produce(node_id, {partition: batch(1)}))[partition].base_offset == 1


async def test_before_any_metadata_no_broker_is_known(kafka: LocalKafka) -> None:
    wire = Wire(settings_of(kafka))
    with pytest.raises(OutcomeUnknownError, match="no broker is known"):
        await wire.init_producer_id()
    await wire.metadata(())
    assert await new_producer_id(wire) >= 0
    await wire.close()


async def test_after_close_nothing_is_sent(kafka: LocalKafka) -> None:
    async with Wire(settings_of(kafka)) as wire:
        await wire.metadata(None)
    with pytest.raises(OutcomeUnknownError, match="closed"):
        await wire.init_producer_id()
    await wire.close()


async def test_one_address_that_answers_is_enough(kafka: LocalKafka) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refusing = taken.getsockname()[1]
    for addresses in (
        f"127.0.0.1:{refusing},{kafka.bootstrap_servers}",
        f"{kafka.bootstrap_servers},127.0.0.1:{refusing}",
    ):
        async with Wire(KafkaSettings(bootstrap_servers=addresses)) as wire:
            assert wire.brokers
    with pytest.raises(OutcomeUnknownError, match=f"127.0.0.1:{refusing}"):
        await Wire(KafkaSettings(bootstrap_servers=f"127.0.0.1:{refusing}")).__aenter__()


async def test_an_address_that_never_answers_costs_no_more_than_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody speaks
        wire = Wire(KafkaSettings(bootstrap_servers=f"127.0.0.1:{silent.getsockname()[1]}"))
        begun = time.monotonic()
        with pytest.raises(OutcomeUnknownError, match="no answer within 300 ms"):
            await wire.metadata((), timeout_ms=300)
        assert 0.3 <= time.monotonic() - begun < 10
        await wire.close()


class Cluster:
    """A partition with three replicas, on a cluster whose brokers a test may kill or pause."""

    def __init__(self, kafka: LocalKafka, wire: Wire, partition: TopicPartition) -> None:
        self.kafka = kafka
        self.wire = wire
        self.partition = partition

    def broker(self, node_id: int) -> Any:
        return next(broker for broker in self.kafka.brokers if broker.node_id == node_id)

    async def replicas(self) -> tuple[int, ...]:
        answer = await self.wire.metadata([self.partition.topic])
        return answer.topics[self.partition.topic].partitions[self.partition.partition].replica_ids


@pytest.fixture
async def cluster(kafka_cluster: LocalKafka) -> AsyncIterator[Cluster]:
    topic = create_topic(kafka_cluster.bootstrap_servers)
    async with Wire(settings_of(kafka_cluster)) as wire:
        (partition,) = await know(wire, topic)
        yield Cluster(kafka_cluster, wire, partition)


async def test_producer_ids_of_all_brokers_are_unique(cluster: Cluster) -> None:
    ids = [await new_producer_id(cluster.wire, node_id) for _ in range(20) for node_id in cluster.wire.brokers]
    assert len(ids) == len(set(ids)) == 60


async def test_a_follower_refuses_to_append(cluster: Cluster) -> None:
    wire, partition = cluster.wire, cluster.partition
    follower = next(node_id for node_id in await cluster.replicas() if node_id != wire.leader_id(partition))
    answer = await wire.produce(follower, {partition: batch(0)})
    assert answer[partition].error is ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_a_batch_sent_again_to_the_next_leader_is_stored_once(cluster: Cluster) -> None:
    """A killed broker: the outcome is unknown, the metadata names a new leader, and that one knows the producer."""
    wire, partition = cluster.wire, cluster.partition
    old = leader(wire, partition)
    assert (await wire.produce(old, {partition: batch(0)}))[partition].error is NONE
    cluster.broker(old).kill()
    with pytest.raises(OutcomeUnknownError):
        await wire.produce(old, {partition: batch(0)}, timeout_ms=5000)

    async def new_leader() -> int | None:
        await wire.metadata([partition.topic])
        return wire.leader_id(partition)

    node_id = await until(new_leader, lambda node_id: node_id not in {None, old})

    async def append(sequence: int) -> Any:
        return (await wire.produce(node_id, {partition: batch(sequence)}))[partition]

    again = await until(lambda: append(0), lambda answer: not answer.error.retriable)
    assert (again.error, again.base_offset) == (NONE, 0)
    following = await append(1)
    assert (following.error, following.base_offset) == (NONE, 1)


async def test_a_broker_that_hangs_costs_no_more_than_the_deadline_and_holds_up_no_other(cluster: Cluster) -> None:
    wire, partition = cluster.wire, cluster.partition
    hanging = leader(wire, partition)
    others = [node_id for node_id in wire.brokers if node_id != hanging]
    await wire.list_offsets(hanging, {partition: LATEST}, lane="open")
    cluster.broker(hanging).pause()

    async def ask(lane: str) -> float:
        begun = time.monotonic()
        with pytest.raises(OutcomeUnknownError, match="no answer within 6000 ms"):
            await wire.list_offsets(hanging, {partition: LATEST}, lane=lane, timeout_ms=6000)
        return time.monotonic() - begun

    async def ask_others() -> None:
        for node_id in others:
            assert (await wire.list_transactions(node_id, lane="not yet open", timeout_ms=5900)).error is NONE

    open_lane, new_lane, _ = await asyncio.gather(ask("open"), ask("new"), ask_others())
    assert max(open_lane, new_lane) < 20
    wire._responsive_id = hanging  # the one it would ask first
    assert (await wire.metadata([partition.topic])).topics[partition.topic].error is NONE
    assert wire._responsive_id != hanging


async def test_a_lane_is_mute_while_a_marker_on_it_waits_for_replicas(cluster: Cluster) -> None:
    """Why markers have lanes of their own: brokers do not read on from a connection that waits for its answer."""
    wire, partition = cluster.wire, cluster.partition
    talker = Talker(wire, await new_producer_id(wire))
    assert (await talker.append(partition, 0, 0, b"a")).error is NONE
    node_id = leader(wire, partition)
    follower = next(replica for replica in await cluster.replicas() if replica != node_id)
    ask = {partition: LATEST}
    await asyncio.gather(*(wire.list_offsets(node_id, ask, lane=lane) for lane in ("markers", "log")))
    cluster.broker(follower).pause()
    marker = TxnMarker(
        producer_id=talker.producer_id,
        producer_epoch=1,
        committed=True,
        partitions=(partition,),
        coordinator_epoch=0,
    )
    marking = asyncio.create_task(wire.write_txn_markers(node_id, [marker]))
    await asyncio.sleep(0)
    with pytest.raises(OutcomeUnknownError):
        await wire.list_offsets(node_id, ask, lane="markers", timeout_ms=1500)
    assert (await wire.list_offsets(node_id, ask, lane="log"))[partition].error is NONE
    with pytest.raises(OutcomeUnknownError):  # the deadline closed the connection that both shared
        await marking
    cluster.broker(follower).resume()
    repeated = await until(
        lambda: wire.write_txn_markers(node_id, [marker]),
        lambda answer: not answer[talker.producer_id][partition].retriable,
    )
    assert repeated == {talker.producer_id: {partition: NONE}}
    assert committed_values(cluster.kafka.bootstrap_servers, partition) == [[b"a"]]


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    kafka = LocalKafka(tmp_path_factory.mktemp("secure-kafka"), secure=True, jvm_options=[QUICK_START])
    try:
        yield kafka.start()
    finally:
        kafka.kill()


def secure_settings(kafka: LocalKafka) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=kafka.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username=kafka.username,
        sasl_password=kafka.password,
        ssl_ca_location=str(kafka.ca_path),
    )


@both_loops
def test_a_transaction_over_sasl_ssl(secure_kafka: LocalKafka, new_loop: NewLoop) -> None:
    topic = create_topic(secure_kafka.bootstrap_servers)

    async def run() -> TopicPartition:
        async with Wire(secure_settings(secure_kafka)) as wire:
            (partition,) = await know(wire, topic)
            ports = {broker.port for broker in wire.brokers.values()}
            assert ports == {int(secure_kafka.secure_servers.split(":")[1])}
            talker = Talker(wire, await new_producer_id(wire))
            assert (await talker.append(partition, 0, 0, b"a" * 100_000)).error is NONE
            assert await talker.mark(partition, 1) is NONE
            return partition

    with asyncio.Runner(loop_factory=new_loop) as runner:
        partition = runner.run(run())
    assert committed_values(secure_kafka.bootstrap_servers, partition) == [[b"a" * 100_000]]


async def test_who_is_refused_is_told_so(secure_kafka: LocalKafka) -> None:
    right = secure_settings(secure_kafka)
    for wrong in (
        dataclasses.replace(right, sasl_password="guess"),
        dataclasses.replace(right, sasl_mechanism="SCRAM-SHA-512"),
        dataclasses.replace(right, ssl_ca_location=None),
    ):
        with pytest.raises(AuthenticationError):
            await Wire(wrong).__aenter__()


async def test_speaking_tls_to_a_listener_without_it_or_the_other_way_round_fails_at_once(
    secure_kafka: LocalKafka, kafka: LocalKafka
) -> None:
    for wrong in (
        dataclasses.replace(secure_settings(secure_kafka), bootstrap_servers=kafka.bootstrap_servers),
        KafkaSettings(bootstrap_servers=secure_kafka.secure_servers),
    ):
        with pytest.raises(OutcomeUnknownError, match=wrong.bootstrap_servers):
            await Wire(wrong).__aenter__()
