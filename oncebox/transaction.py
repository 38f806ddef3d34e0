"""One transaction: nothing of it is seen by read_committed readers before it is committed, all of it afterwards.

Partitions are registered with the coordinator before the first record goes to them. Once a record cannot be written,
every later call raises the reason, and abort() is all that is left.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from oncebox.bulk import Outgoing, Receipt, buffer_many, place_many
from oncebox.claim import Registered, is_decided
from oncebox.errors import AbortableError, AbortedError, OnceboxError
from oncebox.group_offsets import GroupMetadata, as_committed, group_metadata
from oncebox.partition_queue import RecordMetadata
from oncebox.transaction_offsets import TransactionOffsets
from oncebox.transaction_tools import (
    State,
    Tools,
    TransactionName,
    ahead_of,
    explained,
    identity_of,
    misused,
    outcome_of,
    register_group,
    register_partitions,
)
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.wire import CommittedOffset, GroupMember, TopicPartition
from oncebox.writer import Headers, Writer

NO_HEADERS: Headers = []


__all__ = ["State", "Tools", "Transaction", "TransactionName"]


class Transaction:
    """Made by Producer.begin() and Producer.transaction()."""

    def __init__(
        self, tools: Tools, grant: transaction_pb2.Grant | None, registered: Registered, *, prepared: bool = False
    ) -> None:
        """Without a grant it can be filled; records leave once granted() brings it."""
        self.grant = grant or transaction_pb2.Grant()
        self.state = State.PREPARED if prepared else State.OPEN
        # Whether it has been committed, once that is known. Set while a commit is under way.
        self.committing: asyncio.Future[bool] | None = None
        self._granting: asyncio.Future[None] | None = None if grant else asyncio.get_running_loop().create_future()
        # Stored with the commit: shown to readers, and what the next start finds as resume token.
        self.metadata = b""
        self._tools = tools
        self._claim = tools.claim
        self._placement = tools.placement
        self._registered = registered.partitions
        self._groups = set(registered.groups)
        # What the commit that was asked for commits: asked again, it is the same question.
        self._asked: coordinator_pb2.Contents | None = None
        self._to_register: set[TopicPartition] = set()
        self._registering: asyncio.Task[None] | None = None
        # A registration whose answer was lost counts as well.
        self._maybe_registered = bool(registered)
        self._writer = Writer(
            tools.wire,
            tools.settings.writer,
            identity_of(self._claim, self.grant),
            register=self._register,
            registered=self._registered,
            explain=self._explain,
        )
        self._offsets = TransactionOffsets(tools.offsets, self._writer)

    def granted(self, grant: transaction_pb2.Grant, registered: Registered) -> None:
        """The transaction before it has ended."""
        if self._granting is None or self.state is not State.OPEN:
            return
        self.grant = grant
        self._registered = registered.partitions
        self._groups = set(registered.groups)
        self._maybe_registered = bool(registered)
        self._granting.set_result(None)
        self._granting = None
        self._writer.move(identity_of(self._claim, self.grant), self._registered)

    def not_granted(self, error: OnceboxError) -> None:
        self._writer.fail(error)
        if self._granting is not None and not self._granting.done():
            self._granting.set_result(None)

    @property
    def is_granted(self) -> bool:
        return self._granting is None

    async def has_grant(self) -> None:
        """Until the transaction before it has ended, one way or the other."""
        if self._granting is not None:
            await asyncio.shield(self._granting)

    @property
    def number(self) -> int:
        """0 while the one before it has not ended."""
        return self.grant.number

    @property
    def name(self) -> TransactionName:
        return TransactionName(transactional_id=self._claim.transactional_id, number=self.number)

    @property
    def is_open(self) -> bool:
        """Neither committed nor aborted, as far as this client has tried."""
        return self.state in {State.OPEN, State.PREPARING, State.PREPARED}

    @property
    def is_unprepared(self) -> bool:
        """Open, and not known to be prepared: whoever leaves it may abort it."""
        return self.state in {State.OPEN, State.PREPARING}

    @property
    def is_empty(self) -> bool:
        """Neither records nor offsets were sent."""
        return not self._writer.partitions and not self._offsets.groups

    @property
    def buffered_bytes(self) -> int:
        """Of records that are not acknowledged yet."""
        return self._writer.buffered_bytes

    @property
    def is_registered(self) -> bool:
        return self._maybe_registered

    # --- sending ----------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> TopicPartition:
        """Returns once the record is buffered, with where it will go."""
        writer = self._writer
        if self.state is not State.OPEN or writer.error is not None:
            self._check_open()
        where = self._placement.place(topic, key, partition)
        if where is None:
            where = await self._find(topic, key, partition)
        if writer.append(where, value, key, list(headers) if headers else NO_HEADERS, timestamp_ms):
            await writer.room()
        return where

    async def send_and_wait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> RecordMetadata:
        """Returns once the record is written, with its offset."""
        self._check_open()
        where = self._placement.place(topic, key, partition) or await self._find(topic, key, partition)
        self._writer.append(where, value, key, list(headers), timestamp_ms)
        return await self._writer.future_of_last(where)

    async def send_many(self, records: Sequence[Outgoing], *, wait_for_room: bool = True) -> Receipt:
        """Buffers all of them or, where one of them cannot be sent, none. The receipt's metadata() waits until they are
        written; after flush() or commit() its offsets() knows without waiting.
        """
        self._check_open()
        places = await place_many(self._writer, self._placement, records)
        # Another task may have ended it meanwhile.
        self._check_open()
        receipt = buffer_many(self._writer, places, records)
        if wait_for_room:
            await self._writer.room()
        return receipt

    async def room(self) -> None:
        """Waits while more is buffered than buffer_bytes."""
        await self._writer.room()

    async def _find(self, topic: str, key: bytes | None, partition: int | None) -> TopicPartition:
        where = await self._placement.find(topic, key, partition)
        self._check_open()
        return where

    def _check_state(self) -> None:
        if self.state is State.PREPARED:
            raise misused(self.name, "this transaction is prepared: it can only be committed or aborted")
        if self.state is State.PREPARING:
            raise misused(self.name, "this transaction is being prepared: it can only be committed or aborted")
        if self.state is not State.OPEN:
            raise misused(self.name, "this transaction has ended; begin the next one")

    def _check_open(self) -> None:
        self._check_state()
        if self._writer.error is not None:
            raise self._writer.error

    async def send_offsets(
        self,
        offsets: Mapping[TopicPartition, int | CommittedOffset],
        group: GroupMetadata | bytes | str,
        member: GroupMember | None = None,
    ) -> None:
        """Adds a consumer group's next offsets: they count once the transaction is committed.

        `group` is the group's name, or what tells the broker which consumer sends them, so that one whose partitions
        went to another is refused (KIP-447): confluent-kafka's Consumer.consumer_group_metadata().
        """
        self._check_open()
        if not offsets:
            return
        await self.has_grant()
        self._check_open()
        metadata = group_metadata(group, member)
        committed = as_committed(offsets)
        if metadata.group_id not in self._groups:
            self._maybe_registered = True
            self.adopt(await register_group(self._claim, self.grant, metadata.group_id, self.begun_ms_ago()))
            self._groups.add(metadata.group_id)
        self._check_open()
        await self._offsets.send(committed, metadata, self._explain)
        self._check_open()

    async def flush(self) -> None:
        """Until all that was sent is written."""
        self._check_open()
        await self._writer.flush()

    # --- ending -----------------------------------------------------------------------------------------------------

    async def prepare(self, *, metadata: bytes | None = None) -> TransactionName:
        """Everything is written, and from here on only commit() or abort() decides, no timeout: also by a later
        process, if this one dies. Store the name in the other system, in the transaction that is to agree with this.
        """
        if self.state is State.PREPARED:
            return self.name
        if self.state is not State.PREPARING:
            self._check_state()
        await self.has_grant()
        contents = await self._contents(metadata)
        if not contents.written and not contents.group_offsets:
            raise misused(self.name, "nothing was sent: there is nothing to prepare")
        self.metadata = contents.metadata
        # From here on nothing may be sent that the contents do not tell of.
        self.state = State.PREPARING
        request = coordinator_pb2.PrepareRequest(
            transactional_id=self._claim.transactional_id, grant=self.grant, contents=contents
        )
        try:
            await self._claim.call("prepare", request)
        except AbortableError:
            self.state = State.OPEN
            raise
        self.state = State.PREPARED
        return self.name

    async def commit(
        self, *, metadata: bytes | None = None, wait: Literal["complete", "decided"] = "complete"
    ) -> transaction_pb2.Outcome | None:
        """Makes it all visible, or raises. None: there was nothing to commit.

        "complete": every reader can see it, or a second has passed (`outcome.owed` says which partitions lack their
        marker); "decided": it can no longer fail, and the next transaction may begin. After a RetriableError it may be
        called again, unless the next transaction has been begun.
        """
        return await self._commit(self._begin_commit(), metadata, wait)

    def commit_soon(
        self, *, metadata: bytes | None = None, wait: Literal["complete", "decided"] = "decided"
    ) -> asyncio.Task[transaction_pb2.Outcome | None]:
        """Commits while the next transaction is begun and filled: await the result before the one after that.

        Should it fail, the next one cannot be committed either: both are to be aborted.
        """
        committing = self._begin_commit()
        task = asyncio.get_running_loop().create_task(self._commit(committing, metadata, wait))
        # One that is cancelled before its first step does not get as far as to tell the transaction behind it.
        task.add_done_callback(lambda _: self._end_commit(committing, is_committed=False))
        return task

    def _begin_commit(self) -> "asyncio.Future[bool]":
        if self.committing is not None:
            raise misused(self.name, "this transaction is being committed already")
        # While nobody has asked for the next grant, the same question has the same answer, or brings it about.
        may_ask_again = self.state is State.IN_DOUBT and self.grant == self._claim.grant
        if self.state not in {State.PREPARING, State.PREPARED} and not may_ask_again:
            self._check_state()
        committing = self.committing = asyncio.get_running_loop().create_future()
        self._tools.on_state(self)
        return committing

    def _end_commit(self, committing: "asyncio.Future[bool]", *, is_committed: bool) -> None:
        if self.committing is not committing:
            return
        self.committing = None
        self._tools.on_state(self)
        if not committing.done():
            committing.set_result(is_committed)

    async def _commit(
        self, committing: "asyncio.Future[bool]", metadata: bytes | None, wait: Literal["complete", "decided"]
    ) -> transaction_pb2.Outcome | None:
        is_committed = False
        try:
            await self.has_grant()
            contents = self._asked if self.state is State.IN_DOUBT else None
            if contents is None and self.state is not State.PREPARED:
                contents = await self._contents(metadata)
                self.metadata = contents.metadata
                if not contents.written and not contents.group_offsets and not contents.metadata:
                    self._claim.grant = self.grant
                    self._claim.registered = Registered(partitions=self._registered, groups=frozenset(self._groups))
                    self._become(State.ENDED)
                    is_committed = True
                    return None
            outcome = await self._end(transaction_pb2.COMMITTED, contents, wait_complete=wait == "complete")
            is_committed = True
            return outcome
        finally:
            self._end_commit(committing, is_committed=is_committed)

    async def abort(self) -> transaction_pb2.Outcome | None:
        """Nothing of it is ever seen. Also settles a commit whose answer did not come, unless it was decided.

        None: there was nothing to abort.
        """
        if self.state is State.ENDED:
            raise misused(self.name, "this transaction has ended; begin the next one")
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        await self._writer.close(AbortedError("the transaction was aborted"))
        if self._granting is None and (self._maybe_registered or self.state is not State.OPEN):
            return await self._end(transaction_pb2.ABORTED, None, wait_complete=True)
        self._become(State.ENDED)
        if self._granting is not None and not self._granting.done():
            self._granting.set_result(None)
        return None

    async def _contents(self, metadata: bytes | None) -> coordinator_pb2.Contents:
        try:
            await self._writer.flush()
            while await self._offsets.answered():
                await self._writer.flush()
        except OnceboxError as error:
            if is_decided(error):
                await self._writer.close(error)
                self._claim.doubt()
                self._become(State.ENDED)
            raise
        return coordinator_pb2.Contents(
            written=self._writer.written(),
            group_offsets=self._offsets.messages(),
            metadata=self.metadata if metadata is None else metadata,
        )

    async def _end(
        self, result: "transaction_pb2.Result", contents: coordinator_pb2.Contents | None, *, wait_complete: bool
    ) -> transaction_pb2.Outcome:
        before = self.state
        self._asked = contents if result == transaction_pb2.COMMITTED else None
        self._writer.release()
        self._become(State.IN_DOUBT)
        ahead = ahead_of(result, self._writer.partitions, self._offsets.groups)
        try:
            outcome = await self._claim.end(self.grant, result, contents, ahead=ahead, wait_complete=wait_complete)
        except AbortableError as error:
            self._become(State.ENDED if is_decided(error) else before)
            raise
        except BaseException:
            if before in {State.PREPARING, State.PREPARED}:
                # No timeout will decide it: it stays with whoever prepared it.
                self._become(before)
            raise
        if result == transaction_pb2.COMMITTED and self.metadata:
            self._claim.resume_token = self.metadata
        self._become(State.ENDED)
        return outcome

    def _become(self, state: State) -> None:
        self.state = state
        if state is State.ENDED:
            self._writer.let_go()
        self._tools.on_state(self)

    async def outcome(self) -> transaction_pb2.Outcome:
        """What became of it; also after a commit that raised, and from another process by number."""
        await self.has_grant()
        return await outcome_of(self._claim, self.number)

    # --- with the coordinator -----------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Something may have been stored under its grant."""
        return self._writer.has_sent or self._offsets.began_at is not None

    def begun_ms_ago(self) -> int | None:
        if not self.has_begun:
            return None
        began_at = min(at for at in (self._writer.began_at, self._offsets.began_at) if at is not None)
        return int((asyncio.get_running_loop().time() - began_at) * 1000)

    def fail(self, error: OnceboxError) -> None:
        """Whatever is done next raises this, except abort()."""
        self._writer.fail(error)

    def adopt(self, grant: transaction_pb2.Grant) -> None:
        """The grant in hand had expired unused: what is buffered moves over, and is registered anew."""
        if grant == self.grant:
            return
        if self.has_begun:
            self._writer.fail(AbortedError("the transaction was begun under a grant that had expired"))
            return
        self.grant = grant
        self._claim.renewed(grant)
        self._registered = frozenset()
        self._groups.clear()
        self._writer.move(identity_of(self._claim, self.grant))

    def _register(self, where: TopicPartition) -> None:
        if self._granting is not None:
            return  # granted() asks again
        self._maybe_registered = True
        self._to_register.add(where)
        if self._registering is None or self._registering.done():
            self._registering = asyncio.get_running_loop().create_task(self._register_all())

    async def _register_all(self) -> None:
        try:
            while self._to_register:
                wanted, self._to_register = frozenset(self._to_register), set()
                self.adopt(await register_partitions(self._claim, self.grant, wanted, self.begun_ms_ago()))
                self._registered |= wanted
                self._to_register -= wanted
                self._writer.registered(wanted)
        except OnceboxError as error:
            self._writer.fail(error)

    async def _explain(self, error: OnceboxError) -> OnceboxError:
        return await explained(self._claim, self.grant, self.begun_ms_ago() or 0, error)
