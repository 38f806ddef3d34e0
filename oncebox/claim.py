"""A process's claim on a transactional id: its grants, one after another, and what the coordinator says to its calls.

One call that ends a transaction at a time. Where its outcome is not known, or no grant came with it, the claim is in
doubt, and the next begin asks anew with the last grant: refused if somebody else has taken the id since.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oncebox.errors import AbortableError, CoordinatorError, FatalError, OnceboxError
from oncebox.session import Session
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.wire import TopicPartition
from oncebox.writer_settings import WriterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    transaction_timeout_ms: int = 60_000
    # While this process lives, an open transaction is given more time, up to the coordinator's
    # transaction_timeout_max_ms: for batches of unknown length. The timeout then tells how soon a dead one is aborted.
    extend_transactions: bool = False
    call_timeout_ms: int = 30_000
    # How many transactions may be in the works at once: 1 (as Kafka) to 4.
    slots: int = 2
    # A transaction that a former instance has prepared is found in Producer.prepared; else start() is refused.
    keep_prepared: bool = False
    writer: WriterSettings = field(default_factory=WriterSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What the coordinator knows a transaction to write to."""

    partitions: frozenset[TopicPartition] = frozenset()
    groups: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.partitions or self.groups)


NOTHING = Registered()


class Claim:
    def __init__(self, session: Session, transactional_id: str, settings: ProducerSettings) -> None:
        self.transactional_id = transactional_id
        self.instance = uuid.uuid4().hex
        self.grant = transaction_pb2.Grant()
        # Ahead of time: with the transaction that the grant is for.
        self.registered = NOTHING
        self.resume_token = b""
        self.error: OnceboxError | None = None
        # Held while a transaction is being ended, and by whoever begins the next.
        self.turn = asyncio.Lock()
        self._session = session
        self._settings = settings
        # Whatever has this number, or a lower one, is used up, or may be.
        self._used = -1

    async def call(self, name: str, message: Any, *, timeout_s: float | None = None) -> Any:
        timeout_s = self._settings.call_timeout_ms / 1000 if timeout_s is None else timeout_s
        try:
            return await self._session.call(self.transactional_id, name, message, timeout_s=timeout_s)
        except FatalError as error:
            self.error = error
            raise

    async def take(self) -> coordinator_pb2.PreparedTransaction | None:
        """Fences former instances and aborts what they left open; what they left prepared is returned, if kept."""
        return await self._init(None)

    @property
    def is_taken(self) -> bool:
        return self.grant.number > 0

    def doubt(self) -> None:
        """The grant in hand is used up, and the next one not known."""
        self._used = self.grant.number

    @property
    def _in_doubt(self) -> bool:
        return self._used >= self.grant.number

    async def settle(self) -> coordinator_pb2.PreparedTransaction | None:
        """Before each begin, while holding the turn: out of doubt, or what is found prepared. That is to be decided
        first: until then nobody is granted the next.
        """
        # Never without a grant: that would take the id back from whoever has come since.
        return await self._init(self.grant) if self._in_doubt else None

    async def _init(self, grant: transaction_pb2.Grant | None) -> coordinator_pb2.PreparedTransaction | None:
        response = await self.call(
            "init_producer",
            coordinator_pb2.InitProducerRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=self._settings.transaction_timeout_ms,
                instance=self.instance,
                grant=grant,
                slots=self._settings.slots,
                keep_prepared=self._settings.keep_prepared,
            ),
        )
        found = response.prepared if response.HasField("prepared") else None
        self.grant = response.grant if found is None else found.grant
        self.registered = NOTHING
        self.resume_token = response.resume_token
        if found is not None:
            # Only to be decided. Its end may bring no grant for the next: whoever has prepared it holds the same one.
            self.doubt()
        return found

    async def end(
        self,
        grant: transaction_pb2.Grant,
        result: "transaction_pb2.Result",
        contents: coordinator_pb2.Contents | None = None,
        *,
        ahead: Registered = NOTHING,
        wait_complete: bool = True,
    ) -> transaction_pb2.Outcome:
        request = coordinator_pb2.EndRequest(
            transactional_id=self.transactional_id,
            grant=grant,
            result=result,
            contents=contents,
            wait=coordinator_pb2.EndRequest.COMPLETE if wait_complete else coordinator_pb2.EndRequest.DECIDED,
            next_partitions=grouped(ahead.partitions),
            next_group_ids=sorted(ahead.groups),
        )
        used = self._used
        # Before the turn has come: who is cancelled while waiting for it has used the grant all the same.
        self._used = max(used, grant.number)
        async with self.turn:
            try:
                response = await self.call("end", request)
            except AbortableError as error:
                if is_decided(error):
                    self.doubt()
                elif used < grant.number == self._used:
                    self._used = used
                raise
            # Else it is of an older transaction, and what is in hand may be another's already.
            if response.HasField("next") and response.next.number > self.grant.number:
                self.grant = response.next
                self.registered = ahead if response.next_registered else NOTHING
            outcome: transaction_pb2.Outcome = response.outcome
            return outcome

    @property
    def has_registered_ahead(self) -> bool:
        """Whether the grant in hand keeps partitions although nothing was written under it. In doubt it may have been
        used up, and what stands there must be free to time out.
        """
        return bool(self.registered) and not self._in_doubt

    async def heartbeat(self, grant: transaction_pb2.Grant, begun_ms_ago: int | None, timeout_s: float) -> Any:
        beat = coordinator_pb2.Heartbeat(
            transactional_id=self.transactional_id,
            grant=grant,
            begun_ms_ago=begun_ms_ago,
            extend=self._settings.extend_transactions,
        )
        return (await self.call("heartbeat", beat, timeout_s=timeout_s)).grant

    def renewed(self, grant: transaction_pb2.Grant) -> None:
        """The grant in hand had expired unused."""
        if grant != self.grant:
            self.grant = grant
            self.registered = NOTHING

    async def give_back(self) -> None:
        """What was registered ahead would keep the id's clock running."""
        if self.has_registered_ahead and self.error is None:
            await self.end(self.grant, transaction_pb2.ABORTED, wait_complete=False)


def is_decided(error: BaseException) -> bool:
    """Whether the coordinator refused because the transaction has its outcome already."""
    return isinstance(error, CoordinatorError) and error.detail.HasField("outcome")


def grouped(partitions: frozenset[TopicPartition] | Sequence[TopicPartition]) -> list[transaction_pb2.TopicPartitions]:
    by_topic: dict[str, list[int]] = {}
    for where in sorted(partitions):
        by_topic.setdefault(where.topic, []).append(where.partition)
    return [transaction_pb2.TopicPartitions(topic=topic, partitions=found) for topic, found in by_topic.items()]
