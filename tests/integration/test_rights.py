"""A coordinator under Kafka's authorizer, with just the rights that docs/supported-kafka.md names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from oncebox.local import LocalKafka
from oncebox.local.kafka import QUICK_START
from oncebox.settings import KafkaSection
from oncebox.v1 import admin_pb2, coordinator_pb2, transaction_pb2
from tests.support.instance import own_topics, started
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.kafka


@pytest.fixture
def guarded_kafka(tmp_path: Any) -> Iterator[LocalKafka]:
    """Whoever comes by the plain listener is an administrator; the secure one knows a user without any right."""
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with LocalKafka(tmp_path, secure=True, properties=properties, jvm_options=[QUICK_START]) as kafka:
        yield kafka


def allow(kafka: LocalKafka, resource: ResourceType, name: str, *operations: AclOperation) -> None:
    bindings = [
        AclBinding(
            resource,
            name,
            ResourcePatternType.LITERAL,
            f"User:{kafka.username}",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for done in admin.create_acls(bindings).values():
        done.result(60)


async def test_a_coordinator_works_with_just_the_rights_that_the_docs_name(guarded_kafka: LocalKafka) -> None:
    """docs/supported-kafka.md."""
    kafka, own = guarded_kafka, own_topics(1)
    seen, hidden = create_topic(kafka.bootstrap_servers), create_topic(kafka.bootstrap_servers)
    cluster = (AclOperation.CLUSTER_ACTION, AclOperation.CREATE, AclOperation.DESCRIBE_CONFIGS)
    allow(kafka, ResourceType.BROKER, "kafka-cluster", *cluster)
    for topic in (own["log_topic"], own["feed_topic"]):
        operations = (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE_CONFIGS)
        allow(kafka, ResourceType.TOPIC, topic, *operations)
    allow(kafka, ResourceType.GROUP, f"{own['log_topic']}.leaders", AclOperation.READ)
    allow(kafka, ResourceType.TRANSACTIONAL_ID, "*", AclOperation.DESCRIBE)
    allow(kafka, ResourceType.TOPIC, seen, AclOperation.DESCRIBE)
    section = KafkaSection(
        bootstrap_servers=kafka.secure_servers,
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-256",
        sasl_username=kafka.username,
        sasl_password=kafka.password,  # type: ignore[arg-type]
        ssl_ca_location=kafka.ca_path,
    )
    async with started(section, **own) as one:
        await one.until_ready()
        grant = await one.init("a")

        def add(topic: str) -> Any:
            partitions = [transaction_pb2.TopicPartitions(topic=topic, partitions=[0])]
            return one.coordinator.AddPartitions(
                coordinator_pb2.AddPartitionsRequest(transactional_id="a", grant=grant, partitions=partitions)
            )

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await add(hidden)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "TOPIC_AUTHORIZATION_FAILED" in (caught.value.details() or "")
        assert f"see {hidden}: its principal needs Describe there" in (caught.value.details() or "")
        await add(seen)
        ended = await one.coordinator.End(
            coordinator_pb2.EndRequest(transactional_id="a", grant=grant, result=transaction_pb2.ABORTED)
        )
        assert ended.outcome.result == transaction_pb2.ABORTED

        # Who is to find what blocks a topic needs Read there, and is told so.
        where = admin_pb2.DescribePartitionRequest(topic=seen, partition=0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.admin.DescribePartition(where)
        assert f"look at {seen}: its principal needs Read there" in (caught.value.details() or "")
        found = await one.admin.FindHanging(admin_pb2.FindHangingRequest(topics=[seen]))
        told = admin_pb2.UnexaminedPartition(topic=seen, partition=0, why="TOPIC_AUTHORIZATION_FAILED")
        assert list(found.unexamined) == [told]
        allow(kafka, ResourceType.TOPIC, seen, AclOperation.READ)
        async with asyncio.timeout(60):
            while (await one.admin.FindHanging(admin_pb2.FindHangingRequest(topics=[seen]))).unexamined:
                pass
        assert not (await one.admin.DescribePartition(where)).open
