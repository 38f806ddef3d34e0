"""The Coordinator service: each call as one request and one response, and the door to the session."""
# ruff: noqa: N802 - gRPC names methods as the .proto file does

from typing import Any, TypeVar

from coordinator.api.errors import abort
from coordinator.api.front import Front, address_of, asked_ms, named_by
from coordinator.api.guard import Streams
from coordinator.api.replies import METHODS
from coordinator.api.rules import RequestRefusedError, check_name
from coordinator.api.session import serve_session
from coordinator.core.commands import ErrorCode, Refused
from coordinator.telemetry import Telemetry
from oncebox.v1 import coordinator_pb2 as pb
from oncebox.v1.coordinator_pb2_grpc import CoordinatorServicer

Response = TypeVar("Response")


class CoordinatorService(CoordinatorServicer):
    def __init__(self, front: Front, streams: Streams, telemetry: Telemetry, requests_per_session: int) -> None:
        self._telemetry = telemetry
        self._front = front
        self._streams = streams
        self._requests_per_session = requests_per_session

    async def FindCoordinator(self, request: pb.FindCoordinatorRequest, context: Any) -> pb.FindCoordinatorResponse:
        calls = self._front.calls
        try:
            log_partition = calls.partition_of(check_name("transactional id", request.transactional_id))
        except RequestRefusedError as error:
            await abort(context, error.refused, *named_by(request))
        leader = calls.leader_of(log_partition)
        if leader is None:
            nobody = Refused(
                code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
                message=f"nobody leads log partition {log_partition} just now; send the call again",
                retriable=True,
            )
            await abort(context, nobody, request.transactional_id)
        return pb.FindCoordinatorResponse(address=leader.address, instance=leader.instance, log_partition=log_partition)

    async def InitProducer(self, request: pb.InitProducerRequest, context: Any) -> pb.InitProducerResponse:
        return await self._answer("init_producer", request, pb.InitProducerResponse(), context)

    async def AddPartitions(self, request: pb.AddPartitionsRequest, context: Any) -> pb.AddPartitionsResponse:
        return await self._answer("add_partitions", request, pb.AddPartitionsResponse(), context)

    async def AddOffsets(self, request: pb.AddOffsetsRequest, context: Any) -> pb.AddOffsetsResponse:
        return await self._answer("add_offsets", request, pb.AddOffsetsResponse(), context)

    async def Prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:
        return await self._answer("prepare", request, pb.PrepareResponse(), context)

    async def End(self, request: pb.EndRequest, context: Any) -> pb.EndResponse:
        return await self._answer("end", request, pb.EndResponse(), context)

    async def GetOutcome(self, request: pb.GetOutcomeRequest, context: Any) -> pb.GetOutcomeResponse:
        return await self._answer("get_outcome", request, pb.GetOutcomeResponse(), context)

    async def Session(self, _requests: Any, context: Any) -> None:  # type: ignore[override]  # writes by itself
        await serve_session(
            self._front, self._streams, self._telemetry, context, address_of(context), self._requests_per_session
        )

    async def _answer(self, name: str, request: Any, response: Response, context: Any) -> Response:
        timeout_ms = self._front.timeout_ms(asked_ms(context))
        refused = await self._front.handle(METHODS[name], request, response, address_of(context), timeout_ms)
        if refused is not None:
            await abort(context, refused, *named_by(request))
        return response
