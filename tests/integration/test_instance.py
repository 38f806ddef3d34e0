"""One instance as orchestrators and clients see it: while it loads, and without partitions."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from coordinator.log.kafka import KafkaStore
from oncebox.settings import KafkaSection
from oncebox.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.support.instance import own_topics, started

if TYPE_CHECKING:
    from oncebox.local import LocalKafka
    from tests.support.coordinator import Coordinators

pytestmark = pytest.mark.kafka


async def test_an_instance_is_not_ready_while_it_loads_and_says_so(
    kafka: LocalKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, loads = asyncio.Event(), asyncio.Event()
    real = KafkaStore.replay

    async def replay(self: KafkaStore, *arguments: Any) -> None:
        loads.set()
        await may_load.wait()
        await real(self, *arguments)

    monkeypatch.setattr(KafkaStore, "replay", replay)
    async with started(KafkaSection(bootstrap_servers=kafka.bootstrap_servers), **own_topics(1)) as one:
        assert not await one.is_ready()
        async with asyncio.timeout(90):
            await loads.wait()
        assert not await one.is_ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.init("a")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "COORDINATOR_LOAD_IN_PROGRESS" in (caught.value.details() or "")
        may_load.set()
        await one.until_ready()
        assert (await one.init("a")).number == 1


async def test_an_instance_that_leads_nothing_is_ready_and_tells_who_does(coordinators: Coordinators) -> None:
    for _ in range(2):
        # Returns when it is ready.
        await asyncio.to_thread(lambda: coordinators.start(log_partitions="1"))
    async with asyncio.timeout(60):
        # One tells the other that it leads the only partition.
        while True:
            told = {await leader_of(address) for address in coordinators.addresses}
            if len(told) == 1 and told <= set(coordinators.addresses):
                break
            await asyncio.sleep(0.1)


async def leader_of(address: str) -> str:
    """Empty: it has not heard of one yet."""
    request = coordinator_pb2.FindCoordinatorRequest(transactional_id="a")
    async with grpc.aio.insecure_channel(address) as channel:
        with suppress(grpc.aio.AioRpcError):
            response: coordinator_pb2.FindCoordinatorResponse = await coordinator_pb2_grpc.CoordinatorStub(
                channel
            ).FindCoordinator(request)
            return response.address
    return ""
