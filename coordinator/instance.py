"""One coordinator instance: builds the real parts, starts them in order and stops them in good order.

The only place where Kafka, gRPC and the clock meet the rest.
"""

import asyncio
import logging
import secrets
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from coordinator.api.front import Front
from coordinator.api.server import LAST_ANSWERS_S, Api, Service
from coordinator.api.topics import KafkaTopics
from coordinator.cluster import ClusterError, Finding, OwnTopics, Severity, check_cluster, ensure_topics, refuse
from coordinator.config import CoordinatorSettings
from coordinator.core.grants import Limits
from coordinator.feed import Lookups
from coordinator.gateway import service as gateway_service
from coordinator.gateway.service import Gateway
from coordinator.group import Group, MembersUnknownError
from coordinator.hanging import Hanging, ask_peer
from coordinator.leadership import Leadership
from coordinator.log.kafka import KafkaStore
from coordinator.log.measured import MeasuredStore
from coordinator.log.port import Kind
from coordinator.log.reading import KafkaReader
from coordinator.markers.writer import MarkerWriter
from coordinator.metrics import Metrics
from coordinator.peers import CONNECT_TIMEOUT_MS, Peers, PeerServicer
from coordinator.producer_ids import ProducerIdPool, UnavailableError
from coordinator.router import Router
from coordinator.serving import ShardSettings
from coordinator.shard import Shard
from coordinator.steady_clock import SteadyClock
from coordinator.telemetry import Telemetry
from oncebox.access.identity import KeysError
from oncebox.access.permissions import PolicyError
from oncebox.channels import SecureChannel
from oncebox.session import OpenChannel, open_plain_channel
from oncebox.settings import kafka_settings
from oncebox.v1 import peer_pb2
from oncebox.v1.gateway_pb2_grpc import add_GatewayServicer_to_server
from oncebox.v1.peer_pb2_grpc import add_PeersServicer_to_server
from oncebox.wire import Wire, WireError

logger = logging.getLogger(__name__)

MEMBERS_EVERY_S = 5.0
MEMBERS_RETRY_S = 1.0
HANGING_EVERY_S = 600.0
FEED_READER_THREADS = 2
# Of the time that a stop has: log partitions are handed over after it, however long the gateway's transactions take.
GATEWAY_STOP_SHARE = 0.5


def _own_topics(settings: CoordinatorSettings) -> OwnTopics:
    return OwnTopics(
        log=settings.log_topic,
        feed=settings.feed_topic,
        partitions=settings.log_partitions,
        feed_retention_ms=settings.feed_retention_ms,
    )


def peer_channel(settings: CoordinatorSettings) -> OpenChannel:
    """How this instance reaches the others: it shows them the certificate that it shows to clients, or its token."""
    tls = settings.tls
    if tls is None:
        return partial(open_plain_channel, connect_timeout_ms=CONNECT_TIMEOUT_MS)
    authorities = tls.peer_ca_location or tls.client_ca_location
    return SecureChannel(
        ca_location=str(authorities) if authorities else None,
        certificate_location=str(tls.certificate_location),
        key_location=str(tls.key_location),
        token_location=str(settings.peer_token_location) if settings.peer_token_location else None,
        connect_timeout_ms=CONNECT_TIMEOUT_MS,
    )


async def check_only(settings: CoordinatorSettings) -> tuple[Sequence[Finding], ClusterError | None]:
    """What a start would find of the cluster, and whether it would be refused for it."""
    kafka = kafka_settings(settings.kafka)
    async with Wire(kafka) as wire:
        report = await check_cluster(
            wire,
            kafka,
            _own_topics(settings),
            transaction_timeout_max_ms=settings.limits.transaction_timeout_max_ms,
        )
    try:
        refuse(report.findings, strict=settings.strict)
    except ClusterError as error:
        return report.findings, error
    return report.findings, None


class Instance:
    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.instance = uuid.uuid4().hex[:12]
        self.telemetry = Telemetry()
        self._kafka = kafka_settings(settings.kafka, client_id=f"oncebox-coordinator-{self.instance}")
        self._wire = Wire(self._kafka)
        self._own = _own_topics(settings)
        self._tasks: list[asyncio.Task[None]] = []
        self._members_changed = asyncio.Event()
        # As the group last said.
        self._is_member = False
        self._open_channel = peer_channel(settings)
        self._gateway: Gateway | None = None
        self._clock = SteadyClock()

    async def _check(self) -> Sequence[Finding]:
        """What the cluster lacks. Raises ClusterError where that makes a start impossible."""
        await self._wire.metadata(())
        report = await check_cluster(
            self._wire,
            self._kafka,
            self._own,
            transaction_timeout_max_ms=self.settings.limits.transaction_timeout_max_ms,
        )
        refuse(report.findings, strict=self.settings.strict)
        self._expiration_ms = report.producer_id_expiration_ms
        return [finding for finding in report.findings if finding.severity is not Severity.OK]

    async def start(self) -> None:
        settings = self.settings
        for finding in await self._check():
            logger.warning("%s: %s. Mend it with: %s", finding.what, finding.why, " ; ".join(finding.mend))
        await ensure_topics(self._wire, self._kafka, self._own)
        self._api = Api(settings, self.telemetry)
        self.address = self._api.address
        self._kafka_store = KafkaStore(
            self._wire, self._kafka, log_topic=settings.log_topic, feed_topic=settings.feed_topic
        )
        self._store = MeasuredStore(self._kafka_store, self.telemetry)
        # Take-overs must not wait until somebody has found something old in the feed.
        own = {Kind.LOG: settings.log_topic, Kind.FEED: settings.feed_topic}
        self._feed_reader = KafkaReader(self._wire, self._kafka, own, threads=FEED_READER_THREADS)
        lookups = Lookups(self._feed_reader, settings.log_partitions)
        self._markers = MarkerWriter(self._wire)
        self._producer_ids = ProducerIdPool(self._fetch_producer_id)
        self._shard_settings = ShardSettings(
            limits=Limits(producer_id_age_max_ms=self._expiration_ms // 2),
            transaction_timeout_max_ms=settings.limits.transaction_timeout_max_ms,
            id_expiration_ms=settings.id_expiration_ms,
            keep_alive_ms=min(3_600_000, self._expiration_ms // 8),
            writer_forgotten_ms=self._expiration_ms,
            accept_lost_log=settings.accept_lost_log,
            applied=self.telemetry.applied,
        )
        self._leadership = Leadership(self.instance, make_shard=self._make_shard, changed=self._changed)
        self._servicer = PeerServicer(self.instance, self.address, self._leadership.shards.values)
        self._peers = Peers(self.instance, self.address, open_channel=self._open_channel, gone=self._gone)
        self._router = Router(
            instance=self.instance,
            address=self.address,
            partition_count=settings.log_partitions,
            leadership=self._leadership,
            peers=self._peers,
        )
        self._hanging = Hanging(
            wire=self._wire,
            calls=self._router,
            list_open=partial(ask_peer, self._open_channel),
            find_manifests=lookups.find_manifests,
            own_topics=frozenset({settings.log_topic, settings.feed_topic}),
            age_min_ms=settings.limits.transaction_timeout_max_ms,
            now_ms=self._clock.now_ms,
        )
        await self._api.start(
            calls=self._router,
            topics=KafkaTopics(self._wire),
            find_in_feed=lambda transactional_id, number: lookups.find_outcome(
                self._router.partition_of(transactional_id), transactional_id, number
            ),
            hanging=self._hanging,
            now_ms=self._clock.now_ms,
            services=[Service("oncebox.v1.Peers", lambda server: add_PeersServicer_to_server(self._servicer, server))],
            pages={"/metrics": self._metrics().page},
            make_gateway=self._make_gateway if settings.gateway.enabled else None,
        )
        self._group = Group(
            self._kafka,
            self._wire,
            group_id=self._own.group,
            topic=settings.log_topic,
            instance=self.instance,
            address=self.address,
            assigned=self._assigned,
            revoked=self._revoked,
        )
        self._group.start()
        self._tasks = [asyncio.create_task(self._watch_members()), asyncio.create_task(self._sweep_hanging())]

    async def stop(self) -> None:
        """Hands everything over: no client sees an error that it cannot retry."""
        loop = asyncio.get_running_loop()
        # The last answers have their moment in any case.
        until = loop.time() + self.settings.drain_ms / 1_000 - LAST_ANSWERS_S

        def left_s() -> float:
            return max(until - loop.time(), 0)

        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._gateway is not None:
            # First: its transactions are ended by the shards.
            await self._gateway.close(left_s() * GATEWAY_STOP_SHARE)
        await self._leadership.close(left_s())
        self._servicer.announce(leaving=True)
        await self._group.leave(left_s())
        await self._peers.close()
        await self._api.stop(left_s())
        await self._markers.close()
        await self._producer_ids.close()
        await self._kafka_store.close()
        self._feed_reader.close()
        await self._wire.close()

    @property
    def http_port(self) -> int:
        return self._api.http_port

    def reload(self) -> None:
        """Takes certificates, rules and token keys anew; what cannot be used leaves the former in place."""
        if self._api.certificates is not None:
            self._api.certificates.reload()
        try:
            self._api.gate.reload()
        except (PolicyError, KeysError) as error:
            logger.error("not used: %s", error)  # noqa: TRY400 - no trace needed

    # --- parts ------------------------------------------------------------------------------------------------------

    def _make_gateway(self, front: Front) -> Service:
        gateway = self._gateway = Gateway(
            front,
            self.settings,
            address=self.address,
            kafka=self._kafka,
            wire=self._wire,
            feed=self._feed_reader,
            open_channel=self._open_channel,
            now_ms=self._clock.now_ms,
        )
        return Service(gateway_service.NAME, lambda server: add_GatewayServicer_to_server(gateway, server))

    def _make_shard(self, partition: int) -> Shard:
        return Shard(
            partition=partition,
            store=self._store,
            markers=self._markers,
            producer_ids=self._producer_ids,
            instance=self.instance,
            address=self.address,
            now_ms=self._clock.now_ms,
            nonce=lambda: secrets.token_bytes(16),
            settings=self._shard_settings,
            watchers=self._router.watchers,
            listeners=self._router.listeners,
            state_changed=self._changed,
        )

    def _metrics(self) -> Metrics:
        certificates = self._api.certificates
        return Metrics(
            self.telemetry,
            gate=self._api.gate,
            shards=self._leadership.shards.values,
            markers=self._markers.status,
            certificate_expires_at_s=lambda: certificates.expires_at_s if certificates else 0.0,
            now_s=lambda: self._clock.now_ms() / 1_000,
        )

    async def _fetch_producer_id(self) -> int:
        try:
            identity = await self._wire.init_producer_id(timeout_ms=5_000)
        except WireError as error:
            with suppress(WireError):
                await self._wire.metadata((), timeout_ms=5_000)
            raise UnavailableError(str(error)) from error
        if identity.error:
            raise UnavailableError(f"InitProducerId answers {identity.error.name}")
        return identity.producer_id

    # --- events -----------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._servicer.announce()
        self._tell_ready()

    def _tell_ready(self) -> None:
        is_ready = self._is_member and self._leadership.serves_all
        self._tasks.append(asyncio.ensure_future(self._api.set_ready(is_ready=is_ready)))
        self._tasks = [task for task in self._tasks if not task.done()]

    def _assigned(self, partitions: set[int]) -> None:
        self._is_member = True
        self._leadership.assign(partitions)
        self._tell_ready()
        self._members_changed.set()

    async def _revoked(self, partitions: set[int]) -> None:
        self._members_changed.set()
        await self._leadership.revoke(partitions)
        # The group may have shut us out. If not, the rebalance ends with what is ours now, be it nothing.
        self._is_member = bool(self._leadership.shards)
        self._tell_ready()

    def _gone(self, leading: peer_pb2.Leading) -> None:
        """Besides what it led, what nobody leads: it may have died with partitions on their way from one to another,
        and then the group waits for it until the rebalance times out.
        """
        alive = self._peers.leading
        led = {each.log_partition for peer in alive.values() for each in peer.partitions}
        orphans = set(range(self.settings.log_partitions)) - led
        self._leadership.adopt(orphans | {each.log_partition for each in leading.partitions}, set(alive))

    async def _watch_members(self) -> None:
        while True:
            self._members_changed.clear()
            pause_s = MEMBERS_RETRY_S
            try:
                members = await self._group.members()
            except MembersUnknownError as error:
                # The known peers are followed meanwhile.
                logger.info("the group does not say who its members are: %s", error)
            else:
                # While partitions are being given out it may not name all of them, ourselves included.
                if self.instance in members:
                    self._peers.follow(members)
                    pause_s = MEMBERS_EVERY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._members_changed.wait()

    async def _sweep_hanging(self) -> None:
        while True:
            await asyncio.sleep(HANGING_EVERY_S)
            try:
                await self._hanging.sweep()
                self.telemetry.hanging = self._hanging.swept
            except Exception:
                logger.exception("the search for hanging transactions failed; it is tried again")
