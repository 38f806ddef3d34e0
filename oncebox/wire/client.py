"""A thin client for the requests that Kafka's own clients do not send, on aiokafka's connections.

One request, one answer, one deadline: nothing is retried, no task runs in the background, no topic is ever
created. A refusal is a value in the answer; OutcomeUnknownError means that there was none. Only `metadata`
asks several brokers.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self

from aiokafka.conn import collect_hosts

from oncebox.wire import requests
from oncebox.wire.connections import Connections
from oncebox.wire.errors import ErrorCode, OutcomeUnknownError
from oncebox.wire.types import GroupMember

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from oncebox.wire.settings import KafkaSettings
    from oncebox.wire.types import (
        Appended,
        Broker,
        ClusterMetadata,
        CommittedOffset,
        Coordinator,
        DescribedGroup,
        ListedOffset,
        NativeTransactions,
        PartitionMetadata,
        PartitionProducers,
        ProducerIdentity,
        TopicMetadata,
        TopicPartition,
        TxnMarker,
    )

DEFAULT_TIMEOUT_MS: Final = 30_000
# How long `metadata` waits for one broker before it asks the next: one that hangs must not use up the whole deadline.
METADATA_ATTEMPT_MS: Final = 3_000
# And how long at least: a share of the deadline for each of many brokers is less than a new connection with TLS takes,
# or a busy broker, and nobody would ever be heard.
METADATA_ATTEMPT_LEAST_MS: Final = 1_000


class Wire:
    """Use as an async context manager. Not for several event loops or threads.

    A connection is named by broker and `lane`. Requests on one lane to one broker leave in call order,
    several may be under way, and the broker carries them out one after the other; so what must not wait for
    something else gets a lane of its own. A deadline that passes closes that connection: what follows on it
    would have waited behind the missing answer.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._bootstrap_servers = settings.bootstrap_servers
        self._connections = Connections(settings)
        self._topics: dict[str, TopicMetadata] = {}
        self._responsive_id: int | None = None  # the broker that last answered `metadata`
        self._doubted_id: int | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.metadata(())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connections.close()

    @property
    def brokers(self) -> Mapping[int, Broker]:
        """As of the last `metadata`."""
        return self._connections.brokers

    def leader_id(self, partition: TopicPartition) -> int | None:
        """As of the last `metadata` that covered the topic; None where there was none, or no leader."""
        known = self._known(partition)
        return known.leader_id if known is not None else None

    def replica_ids(self, partition: TopicPartition) -> tuple[int, ...]:
        """As of the last `metadata` that covered the topic: the brokers that have it, in order to lead it or not."""
        known = self._known(partition)
        return known.replica_ids if known is not None else ()

    def _known(self, partition: TopicPartition) -> PartitionMetadata | None:
        topic = self._topics.get(partition.topic)
        return topic.partitions.get(partition.partition) if topic is not None else None

    @property
    def topics(self) -> frozenset[str]:
        """That `metadata` has covered."""
        return frozenset(self._topics)

    def doubt(self, node_id: int | None = None) -> None:
        """This broker may have lost touch with the others, and take itself for a leader: `metadata` asks it last. None:
        the one that last said who leads what.
        """
        self._doubted_id = self._responsive_id if node_id is None else node_id

    async def metadata(
        self, topics: Collection[str] | None, *, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> ClusterMetadata:
        """Ask one broker after the other until one answers, and remember brokers and leaders. None: all topics."""
        call = requests.metadata_call(topics)
        deadline = monotonic() + timeout_ms / 1000
        problems = []
        sources = list(self._metadata_sources())
        # Even of a short deadline the first leaves something to the second.
        least_ms = min(METADATA_ATTEMPT_LEAST_MS, timeout_ms // 2)
        for index, (node_id, ask) in enumerate(sources):
            remaining_ms = round((deadline - monotonic()) * 1000)
            if remaining_ms <= 0:
                break
            # Each leaves the others their share of a short deadline.
            share_ms = max(remaining_ms // (len(sources) - index), least_ms, 1)
            attempt_ms = min(METADATA_ATTEMPT_MS, share_ms, remaining_ms)
            try:
                answer = requests.read_metadata(await ask(call, attempt_ms))
            except OutcomeUnknownError as error:
                problems.append(str(error))
            else:
                self._remember(answer, node_id, everything=topics is None)
                return answer
        raise OutcomeUnknownError(f"no broker answered: {'; '.join(problems)}")

    def _metadata_sources(self) -> Iterator[tuple[int | None, Callable[[requests.Call, int], Awaitable[Any]]]]:
        known = random.sample(sorted(self.brokers), len(self.brokers))
        known.sort(key=lambda node_id: (node_id == self._doubted_id, node_id != self._responsive_id))
        for node_id in known:
            yield node_id, partial(self._connections.send, node_id, "metadata")
        # None is known yet, or all have gone: begin anew from the addresses given.
        for host, port, _ in collect_hosts(self._bootstrap_servers):
            yield None, partial(self._connections.ask_address, host, port)

    def _remember(self, answer: ClusterMetadata, node_id: int | None, *, everything: bool) -> None:
        self._connections.brokers = answer.brokers
        self._responsive_id = node_id if node_id in answer.brokers else None
        newest = {name: _newest(self._topics.get(name), topic) for name, topic in answer.topics.items()}
        if everything:
            self._topics.clear()
        self._topics |= newest

    def produce(
        self,
        node_id: int,
        batches: Mapping[TopicPartition, bytes],
        *,
        transactional_id: str | None = None,
        acks: int = -1,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        lane: str = "produce",
    ) -> asyncio.Future[dict[TopicPartition, Appended]]:
        """Append one batch per partition, all led by this broker; a transactional one needs its transactional.id.

        Where the connection is open the request is written before this returns: the answer is to be awaited.
        """
        # The broker gives up first, so that slow replication is answered by name and does not cost the connection.
        broker_timeout_ms = max(timeout_ms - 500, timeout_ms // 2)
        call = requests.produce_call(
            batches, transactional_id=transactional_id, acks=acks, timeout_ms=broker_timeout_ms
        )
        return self._connections.send_now(node_id, lane, call, timeout_ms)

    async def write_txn_markers(
        self,
        node_id: int,
        markers: Sequence[TxnMarker],
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        lane: str = "markers",
    ) -> dict[int, dict[TopicPartition, ErrorCode]]:
        """End transactions on partitions led by this broker, by producer id. What the answer lacks is not done."""
        call = requests.markers_call(markers)
        try:
            answer: dict[int, dict[TopicPartition, ErrorCode]] = await self._connections.send(
                node_id, lane, call, timeout_ms
            )
        except OutcomeUnknownError:
            # It may wait for replicas that follow another leader by now.
            self.doubt(node_id)
            raise
        return answer

    async def txn_offset_commit(
        self,
        node_id: int,
        offsets: Mapping[TopicPartition, CommittedOffset],
        *,
        group_id: str,
        member: GroupMember | None = None,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        lane: str = "groups",
    ) -> dict[TopicPartition, ErrorCode]:
        """Add group offsets to the transaction, at the group's coordinator. They count once its marker is written."""
        call = requests.txn_offset_commit_call(
            offsets,
            group_id=group_id,
            member=member or GroupMember(),
            transactional_id=transactional_id,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
        )
        return requests.read_txn_offset_commit(await self._connections.send(node_id, lane, call, timeout_ms))

    async def init_producer_id(
        self, *, node_id: int | None = None, timeout_ms: int = DEFAULT_TIMEOUT_MS, lane: str = "admin"
    ) -> ProducerIdentity:
        """A producer id that is new in the cluster, from any broker unless one is named."""
        call = requests.init_producer_id_call()
        asked_id = self._any(node_id)
        identity = requests.read_init_producer_id(await self._connections.send(asked_id, lane, call, timeout_ms))
        if identity.error:
            # It may have none left, and no way to the controller that gives out more.
            self.doubt(asked_id)
        return identity

    async def list_offsets(
        self,
        node_id: int,
        timestamps: Mapping[TopicPartition, int],
        *,
        read_committed: bool = False,
        of_replica: bool = False,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        lane: str = "admin",
    ) -> dict[TopicPartition, ListedOffset]:
        """The first offset at or after each timestamp. With `read_committed` LATEST is the last stable offset; with
        `of_replica` it is where this broker's own log ends, be it the leader's or not, and acknowledged or not.
        """
        call = requests.list_offsets_call(timestamps, read_committed=read_committed, of_replica=of_replica)
        return requests.read_list_offsets(await self._connections.send(node_id, lane, call, timeout_ms))

    async def describe_producers(
        self,
        node_id: int,
        partitions: Iterable[TopicPartition],
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        lane: str = "admin",
    ) -> dict[TopicPartition, PartitionProducers]:
        """Who has written to these partitions lately and who has a transaction open there. Any replica answers."""
        call = requests.describe_producers_call(partitions)
        return requests.read_describe_producers(await self._connections.send(node_id, lane, call, timeout_ms))

    async def list_transactions(
        self,
        node_id: int,
        *,
        producer_ids: Collection[int] = (),
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        lane: str = "admin",
    ) -> NativeTransactions:
        """Transactions of Kafka's own coordinator on this broker: for the whole cluster, ask every broker."""
        call = requests.list_transactions_call(producer_ids)
        return requests.read_list_transactions(await self._connections.send(node_id, lane, call, timeout_ms))

    async def may_describe_transactions(
        self, node_id: int, *, timeout_ms: int = DEFAULT_TIMEOUT_MS, lane: str = "admin"
    ) -> bool:
        """Whether `list_transactions` tells all: brokers leave those out that our principal may not describe."""
        # A name that nobody uses, and that no rule for some names is meant for.
        anybody = secrets.token_hex(16)
        call = requests.describe_transactions_call([anybody])
        answer = requests.read_describe_transactions(await self._connections.send(node_id, lane, call, timeout_ms))
        return answer.get(anybody) is not ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED

    async def find_group_coordinator(
        self, group_id: str, *, timeout_ms: int = DEFAULT_TIMEOUT_MS, lane: str = "admin"
    ) -> Coordinator:
        call = requests.find_group_coordinator_call(group_id)
        return requests.read_find_coordinator(await self._connections.send(self._any(None), lane, call, timeout_ms))

    async def describe_group(
        self, node_id: int, group_id: str, *, timeout_ms: int = DEFAULT_TIMEOUT_MS, lane: str = "admin"
    ) -> DescribedGroup:
        """Only the group's coordinator knows."""
        call = requests.describe_group_call(group_id)
        return requests.read_describe_group(await self._connections.send(node_id, lane, call, timeout_ms))

    def _any(self, node_id: int | None) -> int:
        if node_id is not None:
            return node_id
        if self._responsive_id is not None and self._responsive_id != self._doubted_id:
            return self._responsive_id
        if not self.brokers:
            raise OutcomeUnknownError("no broker is known: ask for metadata first; nothing was sent")
        others = sorted(self.brokers.keys() - {self._doubted_id})
        return random.choice(others or sorted(self.brokers))  # noqa: S311


def _newest(known: TopicMetadata | None, told: TopicMetadata) -> TopicMetadata:
    """A broker that is cut off from the others tells for as long who led before."""
    if known is None or known.topic_id != told.topic_id:
        return told
    older = {
        index: before
        for index, partition in told.partitions.items()
        if (before := known.partitions.get(index)) is not None and before.leader_epoch > partition.leader_epoch
    }
    return replace(told, partitions={**told.partitions, **older}) if older else told
