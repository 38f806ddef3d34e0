"""The gateway's producers call the coordinators: straight into this instance where it leads the id, else by gRPC."""

import asyncio
from collections.abc import Callable
from typing import Any

from coordinator.api.front import Front, named_by
from coordinator.api.replies import METHODS, error_of
from coordinator.core.commands import ErrorCode, Refused
from oncebox.errors import RetriableError, error_from
from oncebox.session import RETRY_FIRST_S, RETRY_MAX_S, Fenced, OpenChannel, Session
from oncebox.v1 import coordinator_pb2 as pb

RESPONSES: dict[str, Callable[[], Any]] = {
    "init_producer": pb.InitProducerResponse,
    "add_partitions": pb.AddPartitionsResponse,
    "add_offsets": pb.AddOffsetsResponse,
    "prepare": pb.PrepareResponse,
    "end": pb.EndResponse,
    "get_outcome": pb.GetOutcomeResponse,
    "heartbeat": pb.HeartbeatResponse,
}


class NearSession(Session):
    def __init__(self, front: Front, own_address: str, client_address: str, open_channel: OpenChannel) -> None:
        """`client_address` is who owns what is opened: what a fenced instance is told of its successor."""
        super().__init__([own_address], open_channel=open_channel)
        self._front = front
        self._client_address = client_address

    async def call(self, transactional_id: str, name: str, message: Any, *, timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause_s = RETRY_FIRST_S
        while True:
            left_s = max(deadline - loop.time(), 0.001)
            response = RESPONSES[name]()
            refused = await self._front.handle(
                METHODS[name], message, response, self._client_address, max(int(left_s * 1000), 1)
            )
            if refused is None:
                return response
            if refused.code is ErrorCode.NOT_COORDINATOR:
                return await super().call(transactional_id, name, message, timeout_s=left_s)
            error = error_from(error_of(refused, *named_by(message)))
            if not isinstance(error, RetriableError) or loop.time() + pause_s > deadline:
                raise error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    def listen(self, transactional_id: str, fenced: Fenced) -> Callable[[], None]:
        def push(name: str, refused: Refused) -> None:
            fenced(error_of(refused, name))

        afar = super().listen(transactional_id, fenced)
        near = self._front.calls.listen(transactional_id, push)

        def stop() -> None:
            afar()
            near()

        return stop
