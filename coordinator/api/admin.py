"""The Admin service: what is open, who blocks a partition, and how it is ended."""
# ruff: noqa: N802 - gRPC names methods as the .proto file does

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, TypeVar

from coordinator.api import listing
from coordinator.api.auth import current
from coordinator.api.convert import check_number
from coordinator.api.errors import GOING_DOWN, abort
from coordinator.api.front import Front, address_of, asked_ms, named_by
from coordinator.api.guard import Streams
from coordinator.api.replies import fill_get_outcome
from coordinator.api.rules import RequestRefusedError, check_name, check_topic, refuse, shown
from coordinator.calls import WatchOverrunError
from coordinator.core.commands import Abort, Command, ErrorCode, ForceFence, Refused
from coordinator.hanging import Hanging
from coordinator.open_transactions import Open
from oncebox.access.permissions import ANONYMOUS
from oncebox.v1 import admin_pb2 as pb
from oncebox.v1.admin_pb2_grpc import AdminServicer

logger = logging.getLogger(__name__)

TOPICS_MAX = 1_000
# So many ids are looked at in one go; then those who commit have their turn.
TURN_IDS = 50
# A page ends behind the id with which it gets this long: gRPC refuses what is too large for it (limits.message_bytes),
# and what is listed may hold many partitions, or metadata.
PAGE_BYTES = 256 * 1024

Response = TypeVar("Response", pb.AbortResponse, pb.ForceFenceResponse)


class AdminService(AdminServicer):
    def __init__(
        self,
        front: Front,
        streams: Streams,
        hanging: Hanging,
        now_ms: Callable[[], int],
    ) -> None:
        self._front = front
        self._calls = front.calls
        self._streams = streams
        self._hanging = hanging
        self._now_ms = now_ms

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:
        try:
            query = listing.query(request)
        except RequestRefusedError as error:
            await abort(context, error.refused)
        response = pb.ListResponse()
        after, size = request.page_token, 0
        for seen in range(0, query.ids_max, TURN_IDS):
            ids_max = min(TURN_IDS, query.ids_max - seen)
            states = list(self._calls.page(request.prefix, after, ids_max))
            for state in states:
                log_partition = self._calls.partition_of(state.transactional_id)
                for summary in listing.summaries(state, query, log_partition, self._now_ms()):
                    response.transactions.append(summary)
                    size += summary.ByteSize()
                if len(response.transactions) >= query.page_size or size >= PAGE_BYTES:
                    response.next_page_token = state.transactional_id
                    return response
            if len(states) < ids_max:
                return response
            after = states[-1].transactional_id
            await asyncio.sleep(0)
        response.next_page_token = after
        return response

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        try:
            transactional_id = check_name("transactional id", request.transactional_id)
        except RequestRefusedError as error:
            await abort(context, error.refused, *named_by(request))
        state = self._calls.describe(transactional_id)
        if isinstance(state, Refused):
            await abort(context, state, transactional_id)
        return listing.description(state, self._calls.partition_of(transactional_id), self._now_ms())

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        def command() -> Command:
            return Abort(
                transactional_id=check_name("transactional id", request.transactional_id),
                number=check_number(request.number),
            )

        return await self._call(command, request, pb.AbortResponse(), context)

    async def ForceFence(self, request: pb.ForceFenceRequest, context: Any) -> pb.ForceFenceResponse:
        principal = current().access.principal
        who = "" if principal == ANONYMOUS else f"{principal} "

        def command() -> Command:
            return ForceFence(
                transactional_id=check_name("transactional id", request.transactional_id),
                administrator=f"administrator {who}at {address_of(context)}",
                abort_prepared=request.abort_prepared,
            )

        return await self._call(command, request, pb.ForceFenceResponse(), context)

    async def _call(self, command: Callable[[], Command], request: Any, response: Response, context: Any) -> Response:
        try:
            made = command()
        except RequestRefusedError as error:
            await abort(context, error.refused, *named_by(request))
        logger.warning(
            "%s by %s on %s",
            type(made).__name__,
            shown(current().access.principal),
            shown(made.transactional_id),
            extra={"transactional_id": made.transactional_id, "number": getattr(made, "number", 0)},
        )
        answer = await self._calls.call(made, self._front.timeout_ms(asked_ms(context)))
        if isinstance(answer, Refused):
            await abort(context, answer, *named_by(request))
        # Both are answered with an outcome, as GetOutcome is.
        fill_get_outcome(response, made, answer)
        return response

    async def ListLeaders(self, _request: pb.ListLeadersRequest, _context: Any) -> pb.ListLeadersResponse:
        response = pb.ListLeadersResponse(log_partition_count=self._calls.partition_count)
        for led in sorted(self._calls.leaders(), key=lambda led: led.log_partition):
            response.leaders.add(
                log_partition=led.log_partition,
                instance=led.instance,
                address=led.address,
                coordinator_epoch=led.coordinator_epoch,
                state=led.state,
                transactional_ids=led.transactional_ids,
                debts=led.debts,
            )
        return response

    async def DescribePartition(
        self, request: pb.DescribePartitionRequest, context: Any
    ) -> pb.DescribePartitionResponse:
        try:
            check_topic(request.topic, frozenset())
            if request.partition < 0:
                refuse(f"{request.topic} has no partition {request.partition}")
        except RequestRefusedError as error:
            await abort(context, error.refused)
        described = await self._hanging.describe(request.topic, request.partition)
        if isinstance(described, Refused):
            await abort(context, described)
        return pb.DescribePartitionResponse(
            offset_stable=described.offset_stable,
            offset_high_watermark=described.offset_high_watermark,
            open=_open_messages(described.open),
        )

    async def FindHanging(self, request: pb.FindHangingRequest, context: Any) -> pb.FindHangingResponse:
        try:
            if len(request.topics) > TOPICS_MAX:
                refuse(f"{len(request.topics)} topics in one call; at most {TOPICS_MAX} are possible")
            for topic in request.topics:
                check_topic(topic, frozenset())
        except RequestRefusedError as error:
            await abort(context, error.refused)
        found = await self._hanging.find(frozenset(request.topics), end=request.end)
        if isinstance(found, Refused):
            await abort(context, found)
        return pb.FindHangingResponse(
            hanging=_open_messages(found.hanging),
            unexamined=(
                pb.UnexaminedPartition(topic=each.partition.topic, partition=each.partition.partition, why=each.why)
                for each in found.unexamined
            ),
        )

    async def WatchTransactions(  # type: ignore[override]  # writes by itself
        self, request: pb.WatchTransactionsRequest, context: Any
    ) -> None:
        try:
            listing.check_prefix(request.prefix)
        except RequestRefusedError as error:
            await abort(context, error.refused)
        try:
            ended = await self._streams.run(self._watch(request.prefix, context))
        except WatchOverrunError as error:
            await abort(context, _overrun(error))
        if not ended:
            await abort(context, GOING_DOWN)

    async def _watch(self, prefix: str, context: Any) -> None:
        # The client learns that it is watching before the first event comes.
        await context.send_initial_metadata(())
        changes = self._calls.watch(prefix)
        try:
            async for change in changes:
                await context.write(listing.event(change))
        finally:
            if isinstance(changes, AsyncGenerator):
                await changes.aclose()


def _overrun(error: WatchOverrunError) -> Refused:
    return Refused(
        code=ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        message=f"{error}, and what came after them is not told: List what is open, and watch again",
        retriable=True,
    )


def _open_messages(entries: tuple[Open, ...]) -> Iterator[pb.OpenTransaction]:
    for entry in entries:
        yield pb.OpenTransaction(
            topic=entry.topic,
            partition=entry.partition,
            producer_id=entry.producer_id,
            epoch=entry.epoch,
            offset_first=entry.offset_first,
            age_ms=entry.age_ms,
            kind=int(entry.kind),  # type: ignore[arg-type]
            transactional_id=entry.transactional_id,
            number=entry.number,
            ends_as=int(entry.ends_as),  # type: ignore[arg-type]
            ended=entry.ended,
        )
