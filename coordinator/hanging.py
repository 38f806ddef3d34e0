"""Transactions that are open on a partition: whose they are, and the safe end of those that nobody knows.

Only what every log partition of ours and Kafka's own coordinator disown, for longer than any transaction may last,
counts as hanging; Kafka's own are shown and never touched. What may be of another Oncebox, with a log of its own on the
same brokers, is ended only for a person who asks for it. It lists those alone that our principal may DESCRIBE: as
long as that is not all of them, what the feed holds no commit of may be Kafka's own, and is not ended either.
What is open is asked for before who knows it, and again before it is ended: so nothing that ends or begins meanwhile
can be taken for hanging.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import grpc

from coordinator.calls import Calls
from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.records import Result
from coordinator.open_transactions import (
    Found,
    Kind,
    Known,
    Open,
    PartitionDescription,
    Seen,
    Unexamined,
    classify,
    covers,
)
from oncebox import wire
from oncebox.v1 import manifest_pb2, peer_pb2
from oncebox.wire import (
    OFFSETS_TOPIC,
    ClusterMetadata,
    NativeTransactions,
    OutcomeUnknownError,
    TopicPartition,
    TxnMarker,
    Wire,
    WireError,
)

logger = logging.getLogger(__name__)

NATIVE_LOG = "__transaction_state"
EPOCH_TOP = 32_767
PARTITIONS_PER_REQUEST = 500
# Asked of an instance at a time: what it knows of so many fits into an answer, however long the names of its ids are.
PRODUCER_IDS_PER_REQUEST = 5_000
ASK_TIMEOUT_S = 10.0
# Asked of a broker: it looks at what it has in memory.
ASK_TIMEOUT_MS = 5_000
# Where it has to look through all its ids.
ASK_LONG_TIMEOUT_S = 120.0
LANE = "hanging"


# Topic, partition, producer id, epoch, first offset.
Key = tuple[str, int, int, int, int]
# What the instance at this address knows.
ListOpen = Callable[[str, peer_pb2.ListOpenRequest], Awaitable[peer_pb2.ListOpenResponse]]
# The manifests in the whole feed of these (producer id, epoch).
FindManifests = Callable[[frozenset[tuple[int, int]]], Awaitable[Sequence[manifest_pb2.Manifest]]]


async def ask_peer(
    open_channel: Callable[[str], grpc.aio.Channel], address: str, request: peer_pb2.ListOpenRequest
) -> peer_pb2.ListOpenResponse:
    from oncebox.v1.peer_pb2_grpc import PeersStub

    async with open_channel(address) as channel:
        stub = PeersStub(channel)
        timeout_s = ASK_LONG_TIMEOUT_S if request.producer_ids else ASK_TIMEOUT_S
        response: peer_pb2.ListOpenResponse = await stub.ListOpen(request, timeout=timeout_s)
        return response


class Hanging:
    def __init__(
        self,
        *,
        wire: Wire,
        calls: Calls,
        list_open: ListOpen,
        find_manifests: FindManifests,
        own_topics: frozenset[str],
        age_min_ms: int,
        now_ms: Callable[[], int],
    ) -> None:
        """own_topics: the log and the feed, which hold no transactions; age_min_ms: the longest timeout there is."""
        self._wire = wire
        self._calls = calls
        self._list_open = list_open
        self._find_manifests = find_manifests
        self._own_topics = own_topics
        self._age_min_ms = age_min_ms
        self._now_ms = now_ms
        self._first_swept_ms: dict[Key, int] = {}
        # Of those: what no id of ours has to do with. That never changes, for nobody is given a producer id twice.
        self._strangers: set[Key] = set()

    async def describe(self, topic: str, partition: int) -> PartitionDescription | Refused:
        """Who has a transaction open there; the first of them holds the last stable offset."""
        where = TopicPartition(topic, partition)
        try:
            cluster = await self._wire.metadata([topic])
            if cluster.topics[topic].error is wire.ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                return _refuse_denied(topic, "Describe")
            if partition not in cluster.topics[topic].partitions:
                return _refuse_unknown(f"{topic}:{partition}")
            leader = cluster.topics[topic].partitions[partition].leader_id
            if leader is None:
                return _refuse_unavailable(f"{topic}:{partition} has no leader")
            # Nobody else: brokers that have nothing to say of it may be silent.
            seen, unexamined = await self._seen_by(leader, [where])
            for each in unexamined:
                denied = each.why == wire.ErrorCode.TOPIC_AUTHORIZATION_FAILED.name
                return _refuse_denied(topic, "Read") if denied else _refuse_unavailable(f"{topic}: {each.why}")
            known = await self._known(seen)
            stable = await self._wire.list_offsets(leader, {where: wire.LATEST}, read_committed=True, lane=LANE)
            high = await self._wire.list_offsets(leader, {where: wire.LATEST}, lane=LANE)
        except WireError as error:
            return _refuse_unavailable(f"no answer from Kafka ({type(error).__name__})")
        if failure := stable[where].error or high[where].error:
            return _refuse_unavailable(f"{topic}:{partition} answers {failure.name}")
        return PartitionDescription(
            offset_stable=stable[where].offset,
            offset_high_watermark=high[where].offset,
            open=tuple(self._classified(entry, known) for entry in _in_order(seen)),
        )

    async def find(self, topics: frozenset[str], *, end: bool) -> Found | Refused:
        """The hanging ones on these topics (none named: on all that we may see), ended if so asked."""
        return await self._find(topics, end=end, strangers=set())

    async def _find(self, topics: frozenset[str], *, end: bool, strangers: set[Key]) -> Found | Refused:
        """How strangers would be ended is left open."""
        try:
            cluster = await self._wire.metadata(topics or None)
            for name in sorted(topics):
                if cluster.topics[name].error is wire.ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                    return _refuse_denied(name, "Describe")
            absent = [name for name in sorted(topics) if not cluster.topics[name].partitions]
            if absent:
                return _refuse_unknown(absent[0])
            seen, unexamined = await self._seen(cluster)
            known = await self._known(seen)
            if known.missing:
                return _refuse_unavailable(f"no answer from {', '.join(known.missing)}")
            opened = [self._classified(entry, known) for entry in seen]
            hanging = [entry for entry in opened if entry.kind is Kind.HANGING]
            ends = await self._with_ends([entry for entry in hanging if _key(entry) not in strangers], cluster, known)
            found = await self._end(ends) if end else ends
            left = [entry for entry in hanging if _key(entry) in strangers]
            return Found(hanging=(*found, *left), unexamined=unexamined)
        except WireError as error:
            return _refuse_unavailable(f"no answer from Kafka ({type(error).__name__})")

    async def sweep(self) -> tuple[Open, ...] | Refused:
        """Ends what sweeps have found hanging for the longest timeout: without a person who asks for it, the age by
        record timestamps, which clients set as they like, would be too little.
        """
        # The feed holds no commit of strangers, and never will: it is long, and they may stay for ever.
        found = await self._find(frozenset(), end=False, strangers=self._strangers)
        if isinstance(found, Refused):
            return found
        now_ms = self._now_ms()
        hanging = found.hanging
        self._first_swept_ms = {_key(entry): self._first_swept_ms.get(_key(entry), now_ms) for entry in hanging}
        ripe = [entry for entry in hanging if now_ms - self._first_swept_ms[_key(entry)] >= self._age_min_ms]
        try:
            return await self._end(await self._ours(ripe))
        except WireError as error:
            return _refuse_unavailable(f"no answer from Kafka ({type(error).__name__})")

    async def _ours(self, hanging: Sequence[Open]) -> list[Open]:
        """Those that our feed has a commit of, or whose producer id is or was that of an id of ours."""
        self._strangers &= {_key(entry) for entry in hanging}
        hanging = [entry for entry in hanging if _key(entry) not in self._strangers]
        unsure = [entry for entry in hanging if entry.may_end and entry.ends_as is not Result.COMMITTED]
        if not unsure:
            return hanging
        answers, missing = await self._ask_all(sorted({entry.producer_id for entry in unsure}), whether_held=True)
        if missing:
            # The next sweep asks again.
            return [entry for entry in hanging if entry not in unsure]
        held = {producer_id for answer in answers for producer_id in answer.held}
        for entry in unsure:
            if entry.producer_id not in held:
                self._strangers.add(_key(entry))
                _tell_of_stranger(entry)
        return [entry for entry in hanging if _key(entry) not in self._strangers]

    @property
    def swept(self) -> int:
        """How many the last sweep found."""
        return len(self._first_swept_ms)

    def _classified(self, seen: Seen, known: Known) -> Open:
        return classify(seen, known, now_ms=self._now_ms(), age_min_ms=self._age_min_ms)

    async def _seen(self, cluster: ClusterMetadata) -> tuple[list[Seen], tuple[Unexamined, ...]]:
        """In order of partition and offset; and what could not be looked at."""
        by_leader: dict[int, list[TopicPartition]] = defaultdict(list)
        unexamined: list[Unexamined] = []
        for name, topic in cluster.topics.items():
            if name in self._own_topics:
                continue
            for index, partition in topic.partitions.items():
                if partition.leader_id is not None:
                    by_leader[partition.leader_id].append(TopicPartition(name, index))
                else:
                    unexamined.append(Unexamined(TopicPartition(name, index), "it has no leader"))
        seen: list[Seen] = []
        for leader, partitions in by_leader.items():
            for start in range(0, len(partitions), PARTITIONS_PER_REQUEST):
                found, not_examined = await self._seen_by(leader, partitions[start : start + PARTITIONS_PER_REQUEST])
                seen += found
                unexamined += not_examined
        return _in_order(seen), tuple(sorted(unexamined))

    async def _seen_by(self, leader: int, partitions: Sequence[TopicPartition]) -> tuple[list[Seen], list[Unexamined]]:
        seen: list[Seen] = []
        unexamined: list[Unexamined] = []
        answer = await self._wire.describe_producers(leader, partitions, lane=LANE)
        for where, described in answer.items():
            if described.error:
                logger.warning("%s:%d is not examined: %s", *where, described.error.name)
                unexamined.append(Unexamined(where, described.error.name))
            seen += [
                Seen(where, producer, producer.txn_start_offset)
                for producer in described.producers
                if producer.txn_start_offset is not None
            ]
        return seen, unexamined

    async def _known(self, seen: Iterable[Seen]) -> Known:
        producer_ids = sorted({entry.producer.producer_id for entry in seen})
        if not producer_ids:
            return Known(ours={}, native={}, sees_all_native=True, missing=())
        answers, missing = await self._ask_all(producer_ids)
        ours = {(entry.producer_id, entry.epoch): entry for answer in answers for entry in answer.open}
        native, sees_all = await self._native(producer_ids, missing)
        return Known(ours=ours, native=native, sees_all_native=sees_all, missing=tuple(missing))

    async def _ask_all(
        self, producer_ids: Sequence[int], *, whether_held: bool = False
    ) -> tuple[list[peer_pb2.ListOpenResponse], list[str]]:
        """What all instances answer of these, and which log partitions nobody speaks for."""
        heard: list[peer_pb2.ListOpenResponse] = []
        missing: set[int] = set()
        for start in range(0, len(producer_ids), PRODUCER_IDS_PER_REQUEST):
            some = producer_ids[start : start + PRODUCER_IDS_PER_REQUEST]
            request = peer_pb2.ListOpenRequest(open_of=some, producer_ids=some if whether_held else ())
            answers, unanswered = await self._ask_each(request)
            heard += answers
            missing |= unanswered
        return heard, [f"log partition {partition}" for partition in sorted(missing)]

    async def _ask_each(self, request: peer_pb2.ListOpenRequest) -> tuple[list[peer_pb2.ListOpenResponse], set[int]]:
        leaders = {led.log_partition: led.address for led in self._calls.leaders()}
        addresses = sorted(set(leaders.values()))
        asking = (self._list_open(address, request) for address in addresses)
        heard: list[peer_pb2.ListOpenResponse] = []
        unanswered = set(range(self._calls.partition_count))
        for address, answer in zip(addresses, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                logger.warning("%s does not say what is open there: %s", address, type(answer).__name__)
                continue
            # One that has lost a partition may not have noticed: it does not speak for the one that leads it now.
            unanswered -= {partition for partition in answer.log_partitions if leaders.get(partition) == address}
            heard.append(answer)
        return heard, unanswered

    async def _native(self, producer_ids: Sequence[int], missing: list[str]) -> tuple[dict[int, str], bool]:
        cluster = await self._wire.metadata([NATIVE_LOG])
        for index, partition in cluster.topics[NATIVE_LOG].partitions.items():
            if partition.leader_id is None:
                missing.append(f"{NATIVE_LOG}:{index}")
        native = {}
        sees_all = True
        answers = await asyncio.gather(*(self._native_of(broker, producer_ids) for broker in cluster.brokers))
        for broker, answer in zip(cluster.brokers, answers, strict=True):
            if answer is None:
                missing.append(f"broker {broker}")
                continue
            listed, tells_all = answer
            sees_all = sees_all and tells_all
            if listed.error:
                missing.append(f"broker {broker} ({listed.error.name})")
            native.update({entry.producer_id: entry.transactional_id for entry in listed.transactions})
        return native, sees_all

    async def _native_of(self, broker: int, producer_ids: Sequence[int]) -> tuple[NativeTransactions, bool] | None:
        """And whether that is all of them. None: it does not answer."""
        try:
            tells_all = await self._wire.may_describe_transactions(broker, timeout_ms=ASK_TIMEOUT_MS, lane=LANE)
            listed = await self._wire.list_transactions(
                broker, producer_ids=producer_ids, timeout_ms=ASK_TIMEOUT_MS, lane=LANE
            )
        except OutcomeUnknownError as error:
            logger.warning("broker %d does not say what Kafka's own coordinator has open there: %s", broker, error)
            return None
        return listed, tells_all

    async def _with_ends(self, hanging: Sequence[Open], cluster: ClusterMetadata, known: Known) -> tuple[Open, ...]:
        if not hanging:
            return ()
        manifests = await self._find_manifests(frozenset((entry.producer_id, entry.epoch) for entry in hanging))
        topic_ids = {name: topic.topic_id for name, topic in cluster.topics.items()}
        offsets = cluster.topics.get(OFFSETS_TOPIC)
        offsets_partitions = len(offsets.partitions) if offsets else 1
        ended = []
        for entry in hanging:
            topic_id = topic_ids[entry.topic]
            id_bytes = topic_id.bytes if topic_id else b""
            covering = [each for each in manifests if covers(each, entry, id_bytes, offsets_partitions)]
            ended.append(
                replace(
                    entry,
                    ends_as=Result.COMMITTED if covering else Result.ABORTED,
                    may_end=known.sees_all_native or bool(covering),
                    transactional_id=covering[0].transactional_id if covering else "",
                    number=covering[0].number if covering else 0,
                )
            )
        return tuple(ended)

    async def _end(self, hanging: Sequence[Open]) -> tuple[Open, ...]:
        """Each as `ends_as` says, if it is still open just as it was."""
        if not hanging:
            return ()
        now_open, _ = await self._seen(await self._wire.metadata({entry.topic for entry in hanging}))
        still = {
            (*seen.partition, seen.producer.producer_id, seen.producer.producer_epoch, seen.offset_first)
            for seen in now_open
        }
        return tuple([await self._mark(entry) if _key(entry) in still else entry for entry in hanging])

    async def _mark(self, entry: Open) -> Open:
        if not entry.may_end:
            logger.warning(
                "hanging transaction on %s:%d, producer id %d, epoch %d: not ended, it may be of Kafka's own "
                "coordinator: we may not see all of those; `oncebox coordinator check` tells the command",
                entry.topic,
                entry.partition,
                entry.producer_id,
                entry.epoch,
            )
            return entry
        where = TopicPartition(entry.topic, entry.partition)
        leader = self._wire.leader_id(where)
        if leader is None:
            return entry
        fences = entry.epoch < EPOCH_TOP
        marker = TxnMarker(
            producer_id=entry.producer_id,
            # One above, as our own markers are: a late write of the same epoch is refused from then on.
            producer_epoch=entry.epoch + 1 if fences else entry.epoch,
            committed=entry.ends_as is Result.COMMITTED,
            partitions=(where,),
            coordinator_epoch=max(entry.coordinator_epoch, 0),
            transaction_version=2 if fences else 1,
        )
        try:
            answer = await self._wire.write_txn_markers(leader, [marker], lane=LANE)
        except OutcomeUnknownError:
            # No reason to say nothing of those before it, or to leave those after it.
            error = wire.ErrorCode.NETWORK_EXCEPTION
        else:
            error = answer.get(entry.producer_id, {}).get(where, wire.ErrorCode.UNKNOWN_SERVER_ERROR)
        logger.warning(
            "hanging transaction on %s:%d, producer id %d, epoch %d, from offset %d: %s %s",
            *where,
            entry.producer_id,
            entry.epoch,
            entry.offset_first,
            "not ended:" if error else "ended as",
            error.name if error else entry.ends_as.name,
        )
        return replace(entry, ended=not error)


def _tell_of_stranger(entry: Open) -> None:
    logger.warning(
        "hanging transaction on %s:%d, producer id %d, epoch %d: not ended, for no id of ours has this producer id; if "
        "no other Oncebox writes there, end it: oncebox txn hanging --topic %s --end",
        entry.topic,
        entry.partition,
        entry.producer_id,
        entry.epoch,
        entry.topic,
    )


def _in_order(seen: Iterable[Seen]) -> list[Seen]:
    return sorted(seen, key=lambda entry: (entry.partition, entry.offset_first))


def _key(entry: Open) -> Key:
    return entry.topic, entry.partition, entry.producer_id, entry.epoch, entry.offset_first


def _refuse_unknown(what: str) -> Refused:
    return Refused(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message=f"{what} does not exist", retriable=True)


def _refuse_denied(topic: str, operation: str) -> Refused:
    return Refused(
        code=ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        message=f"Kafka does not let the coordinator look at {topic}: its principal needs {operation} there",
    )


def _refuse_unavailable(why: str) -> Refused:
    return Refused(
        code=ErrorCode.COORDINATOR_NOT_AVAILABLE,
        message=f"{why}; nothing was ended, send the call again",
        retriable=True,
    )
