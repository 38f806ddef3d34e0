"""A coordinator instance in this process, as orchestrators and clients see it: by its ports."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.config import CoordinatorSettings
from coordinator.instance import Instance
from oncebox.v1 import admin_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc, transaction_pb2
from proof.faults.process import http_ok

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from oncebox.settings import KafkaSection

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Seen:
    """An instance, by its ports."""

    def __init__(self, instance: Instance, channel: grpc.aio.Channel) -> None:
        self.instance = instance
        self.coordinator = coordinator_pb2_grpc.CoordinatorStub(channel)
        self.admin = admin_pb2_grpc.AdminStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def is_ready(self) -> bool:
        """By health and by readiness."""
        told = await self._health.Check(health_pb2.HealthCheckRequest(service="oncebox.v1.Coordinator"))
        url = f"http://127.0.0.1:{self.instance.http_port}/ready"
        ready: bool = await asyncio.to_thread(http_ok, url)
        assert told.status in {SERVING, NOT_SERVING}
        return ready and told.status == SERVING

    async def until_ready(self) -> None:
        async with asyncio.timeout(90):
            while not await self.is_ready():  # noqa: ASYNC110 - as an orchestrator asks
                await asyncio.sleep(0.05)

    async def init(self, name: str) -> transaction_pb2.Grant:
        request = coordinator_pb2.InitProducerRequest(
            transactional_id=name, transaction_timeout_ms=60_000, instance="i"
        )
        response: coordinator_pb2.InitProducerResponse = await self.coordinator.InitProducer(request)
        return response.grant


@asynccontextmanager
async def started(kafka: KafkaSection, **settings: Any) -> AsyncIterator[Seen]:
    instance = Instance(CoordinatorSettings(kafka=kafka, listen_port=0, http_port=0, **settings))
    await instance.start()
    try:
        async with grpc.aio.insecure_channel(instance.address) as channel:
            yield Seen(instance, channel)
    finally:
        await instance.stop()


def own_topics(partitions: int) -> dict[str, Any]:
    name = uuid.uuid4().hex[:8]
    return {"log_topic": f"log.{name}", "feed_topic": f"commits.{name}", "log_partitions": partitions}
