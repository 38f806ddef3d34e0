"""The Gateway service: the door to Transact streams and batches, with the limits that keep both bounded.

A batch is committed by the instance that leads its transactional id; any other hands it on, once.
"""
# ruff: noqa: N802 - gRPC names methods as the .proto file does

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from coordinator.api.errors import EXPIRED, GOING_DOWN, STATUS, UNDECODABLE, abort, abort_as
from coordinator.api.front import Front, address_of
from coordinator.api.rules import RequestRefusedError, check_name
from coordinator.config import CoordinatorSettings
from coordinator.gateway import convert, tokens
from coordinator.gateway.batches import Batches, BatchLimits, BusyError
from coordinator.gateway.holders import Holders
from coordinator.gateway.session import NearSession
from coordinator.gateway.stream import TransactStream
from coordinator.log import codec
from coordinator.log.port import Kind, Reader
from oncebox.claim import ProducerSettings
from oncebox.errors import BrokersUnavailableError, DeliveryError, OnceboxError, RecordsRefusedError
from oncebox.producer import Producer
from oncebox.reader.ends import first_since
from oncebox.session import OpenChannel
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import manifest_pb2, transaction_pb2
from oncebox.v1.gateway_pb2_grpc import GatewayServicer, GatewayStub
from oncebox.wire import KafkaSettings, Wire
from oncebox.writer_settings import WriterSettings

NAME = "oncebox.v1.Gateway"
FORWARDED = "oncebox-forwarded"
TRANSACTION_TIMEOUT_MS = 60_000
NOT_OURS = frozenset({grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED})


class Gateway(GatewayServicer):
    def __init__(
        self,
        front: Front,
        settings: CoordinatorSettings,
        *,
        address: str,
        kafka: KafkaSettings,
        wire: Wire,
        feed: Reader,
        open_channel: OpenChannel,
        now_ms: Callable[[], int],
    ) -> None:
        self._front = front
        self._settings = settings.gateway
        self._metadata_bytes = settings.limits.metadata_bytes
        self._feed_topic = settings.feed_topic
        self._address = address
        self._kafka = kafka
        self._wire = wire
        self._feed = feed
        self._open_channel = open_channel
        self._closing = asyncio.Event()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._holders = Holders(self._producer_of_stream, self._settings.sessions)
        limits = BatchLimits(
            window_ms=self._settings.request_window_ms,
            requests_remembered=self._settings.requests_remembered,
            ids=self._settings.batch_ids,
            waiting_bytes=self._settings.batch_waiting_bytes,
            metadata_bytes=self._metadata_bytes,
            idle_ms=self._settings.batch_idle_ms,
        )
        self._batches = Batches(self._producer_of_batches, self._read_feed, limits, now_ms)

    async def close(self, within_s: float) -> None:
        """Batches under way are finished, transactions of streams aborted; the streams end."""
        self._closing.set()
        await asyncio.gather(self._batches.close(within_s), self._holders.close(within_s))
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    # --- streams ------------------------------------------------------------------------------------------------------

    async def Transact(self, _requests: Any, context: Any) -> None:  # type: ignore[override]
        if self._closing.is_set():
            await abort(context, GOING_DOWN)
        stream = TransactStream(
            context,
            address_of(context),
            self._holders,
            window_bytes=self._settings.window_bytes,
            grace_max_ms=self._settings.grace_max_ms,
        )
        await stream.run()
        if stream.is_garbled:
            await abort(context, UNDECODABLE)
        if stream.is_expired:
            await abort(context, EXPIRED)
        if self._closing.is_set():
            await abort(context, GOING_DOWN)

    def _producer_of_stream(self, request: pb.Open, address: str) -> Producer:
        settings = ProducerSettings(
            transaction_timeout_ms=request.transaction_timeout_ms or TRANSACTION_TIMEOUT_MS,
            keep_prepared=bool(request.resume_number),
            writer=self._writer_settings(),
        )
        return self._producer(request.transactional_id, settings, address, request.instance)

    # --- batches ------------------------------------------------------------------------------------------------------

    async def CommitBatch(self, request: pb.CommitBatchRequest, context: Any) -> pb.CommitBatchResponse:
        if self._closing.is_set():
            await abort(context, GOING_DOWN)
        await self._check(request, context)
        calls = self._front.calls
        partition = calls.partition_of(request.transactional_id)
        leader = calls.leader_of(partition)
        if leader is None:
            await self._refuse(
                context,
                convert.refusal(
                    f"nobody leads log partition {partition} just now; send the call again",
                    transaction_pb2.COORDINATOR_NOT_AVAILABLE,
                ),
            )
        if leader.instance != calls.instance:
            return await self._forward(request, context, leader.address)
        try:
            return await self._batches.commit(request)
        except BusyError as error:
            await self._refuse(context, convert.refusal(str(error), transaction_pb2.THROTTLING_QUOTA_EXCEEDED))
        except OnceboxError as error:
            told = convert.error_of(error, request.transactional_id, 0)
            if isinstance(error, DeliveryError) and not isinstance(error, RecordsRefusedError):
                told.retriable = True  # it is aborted: the same request may be tried again
            await self._refuse(context, told)

    async def _check(self, request: pb.CommitBatchRequest, context: Any) -> None:
        most = self._settings.batch_records
        try:
            check_name("transactional id", request.transactional_id)
            check_name("request id", request.request_id)
        except RequestRefusedError as error:
            await abort(context, error.refused, request.transactional_id)
        if not request.records and not request.metadata:
            await self._refuse(context, convert.refusal("a batch without records and metadata says nothing"))
        if len(request.records) > most:
            message = f"{len(request.records)} records in a batch, {most} are possible: use Transact"
            await self._refuse(context, convert.refusal(message, transaction_pb2.MESSAGE_TOO_LARGE))
        # The resume token of the id counts, too, where it has one: that is looked at when it is known.
        too_large = tokens.too_large(request, b"", self._metadata_bytes)
        if too_large is not None:
            await self._refuse(context, too_large)

    async def _forward(self, request: pb.CommitBatchRequest, context: Any, address: str) -> pb.CommitBatchResponse:
        elsewhere = convert.refusal(
            f"the id's leader is at {address}; send the call there", transaction_pb2.NOT_COORDINATOR
        )
        elsewhere.leader_address = address
        if any(key == FORWARDED for key, _ in context.invocation_metadata() or ()):
            await self._refuse(context, elsewhere)
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open_channel(address)
        try:
            response: pb.CommitBatchResponse = await GatewayStub(channel).CommitBatch(
                request, metadata=((FORWARDED, self._address),), timeout=context.time_remaining()
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in NOT_OURS:
                # Its client may do there what instances may not do for each other.
                await self._refuse(context, elsewhere)
            details = tuple((key, value) for key, value in error.trailing_metadata() or () if key.endswith("-bin"))
            if error.code() is grpc.StatusCode.UNAVAILABLE and not details:
                self._leave(address, channel)
            await context.abort(error.code(), error.details() or "", details)
            raise
        return response

    def _leave(self, address: str, channel: grpc.aio.Channel) -> None:
        """Nobody has answered there. The next call opens another channel, which reads the certificates of then: this
        one would show for ever those with which it was opened. Calls that are under way on it may end.
        """
        if self._channels.get(address) is channel:
            left = self._channels.pop(address)
            task = asyncio.get_running_loop().create_task(left.close(TRANSACTION_TIMEOUT_MS / 1000))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _refuse(self, context: Any, error: transaction_pb2.Error) -> NoReturn:
        await abort_as(STATUS[error.code], context, error)

    def _producer_of_batches(self, transactional_id: str) -> Producer:
        settings = ProducerSettings(transaction_timeout_ms=TRANSACTION_TIMEOUT_MS, writer=self._writer_settings())
        return self._producer(transactional_id, settings, self._address, "")

    async def _read_feed(self, transactional_id: str, since_ms: int) -> AsyncIterator[manifest_pb2.Manifest]:
        partition = self._front.calls.partition_of(transactional_id)
        # Not asked of the leader alone, as the feed's end is not: what it had not heard of would be committed twice.
        offset_first = await first_since(self._wire, self._feed_topic, partition, since_ms)
        if offset_first is None:
            raise BrokersUnavailableError(f"too few brokers say what {self._feed_topic}:{partition} holds")
        if offset_first < 0:
            return  # nothing has been committed since
        key = transactional_id.encode()
        async for chunk in self._feed.read(Kind.FEED, partition, offset_first, None):
            for entry in chunk:
                if entry.key == key:
                    record = codec.parse_feed(entry.value)
                    if record.WhichOneof("record") == "manifest":
                        yield record.manifest

    # --- producers ----------------------------------------------------------------------------------------------------

    def _writer_settings(self) -> WriterSettings:
        return WriterSettings(buffer_bytes=self._settings.window_bytes)

    def _producer(
        self, transactional_id: str, settings: ProducerSettings, client_address: str, instance: str
    ) -> Producer:
        return Producer(
            self._kafka,
            transactional_id=transactional_id,
            settings=settings,
            session=NearSession(self._front, self._address, client_address, self._open_channel),
            instance=instance,
        )
