"""A client that keeps the protocol's rules: registers before it writes, commits only what was acknowledged, asks again
where it got no answer. Whether it has been fenced meanwhile it cannot know: each of them may be a zombie.

It copies the items of its source into Kafka; where to go on after a crash it knows from the id's resume token alone.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random

from coordinator.core.commands import (
    Command,
    End,
    Ended,
    ErrorCode,
    Granted,
    Heartbeat,
    InitProducer,
    Prepare,
    Refused,
    Register,
    Registered,
)
from coordinator.core.records import (
    NOTHING,
    Contents,
    Grant,
    GroupOffset,
    GroupOffsets,
    GroupPartition,
    Result,
    Run,
    TopicPartition,
    Written,
)
from oncebox import wire
from proof.checker import history as h
from proof.sim.caller import Caller
from proof.sim.database import DatabaseError, Session, settle
from proof.sim.jobs import Habits, Job
from proof.sim.loop import Process
from proof.sim.network import NoAnswerError
from proof.sim.partition import NO_SEQUENCE
from proof.sim.world import OFFSETS_TOPIC, World

WRITE_TIMEOUT_S = 1.0
NO_TOPIC = "none"
# How long a write is tried before the transaction is given up.
WRITE_PATIENCE_S = 2.5


class FencedError(Exception):
    """Somebody else owns the id."""


class SpoiltError(Exception):
    """The transaction can only be aborted."""


class StartOverError(Exception):
    """The transaction is over, or cannot be had: claim the next grant, or begin without one."""

    def __init__(self, claim: Grant | None = None) -> None:
        self.claim = claim


@dataclass(slots=True)
class Draft:
    """One transaction in the making."""

    items: int
    begun_s: float
    sent: dict[TopicPartition, list[int]] = field(default_factory=dict)
    with_offsets: bool = False


class Producer:
    def __init__(self, world: World, name: str, job: Job, habits: Habits, rng: Random) -> None:
        self.name = name
        self.job = job
        # Fenced, it gives up.
        self.retired = not habits.stubborn
        self.process = Process(world.loop, name)
        self.task = self.process.spawn(self._run())
        self._world = world
        self._habits = habits
        self._rng = rng
        self._caller = Caller(world, name, rng)
        self._grant: Grant
        self._position = 0
        self._serial = 0
        self._registered: frozenset[TopicPartition] = frozenset()
        self._groups: frozenset[GroupPartition] = frozenset()
        # Which incarnation of each partition was registered.
        self._incarnations: dict[TopicPartition, str] = {}
        self._sequences: dict[tuple[int, int, TopicPartition], int] = {}
        self._group = GroupPartition(f"group-{job.transactional_id}", 0)

    async def _run(self) -> None:
        claim: Grant | None = None
        while not self.job.done:
            try:
                await self._init(claim)
                while self._position < self.job.items:
                    try:
                        await self._transaction()
                    except SpoiltError:
                        await self._end(Result.ABORTED, NOTHING, 0)
                self.job.done = True
            except StartOverError as error:
                claim = error.claim
            except FencedError:
                claim = None
                if self.retired:
                    return
                await asyncio.sleep(0.2 + 2 * self._rng.random())

    # --- who may write ----------------------------------------------------------------------------------------------

    async def _init(self, claim: Grant | None) -> None:
        habits = self._habits
        keep_prepared = self.job.two_phase and self._rng.random() < 0.7
        while True:
            command = InitProducer(
                transactional_id=self.job.transactional_id,
                instance=self.name,
                address=self.name,
                transaction_timeout_ms=self._world.plan.transaction_timeout_ms,
                grant=claim,
                without_waiting=habits.without_waiting,
                keep_prepared=keep_prepared,
                slots_max=habits.slots_max,
            )
            answer = await self._caller.call(command)
            if isinstance(answer, Refused):
                match answer.code:
                    case ErrorCode.PRODUCER_FENCED if claim is not None:
                        raise FencedError
                    case ErrorCode.INVALID_PRODUCER_ID_MAPPING if claim is not None:
                        claim = None
                    case ErrorCode.INVALID_TXN_STATE if not keep_prepared:
                        keep_prepared = True
                    case _:
                        self._unexpected(command, answer)
                continue
            reply = answer.reply
            if not isinstance(reply, Granted):
                raise TypeError(reply)
            if reply.prepared is None:
                break
            claim = reply.grant
            await self._resolve(claim)
        self._take(reply.grant)
        if self.job.resumable:
            self._position = int(reply.resume_token or b"0")

    def _take(self, grant: Grant) -> None:
        self._grant = grant
        self._registered, self._groups = frozenset(), frozenset()

    def _look_at(self, partitions: frozenset[TopicPartition]) -> None:
        """Before they are registered: what is made again after that is not what was registered."""
        for partition in partitions:
            led = self._world.cluster.led.get(wire.TopicPartition(*partition))
            self._incarnations[partition] = led.partition.name if led else NO_TOPIC

    def _unexpected(self, command: Command, refused: Refused) -> None:
        """A client that keeps the rules never gets this answer."""
        self._world.recorder.history.append(
            h.Broken(where=f"{self.name}: {type(command).__name__}", error=f"{refused.code.name}: {refused.message}")
        )
        raise StartOverError

    def _refused(self, command: Command, refused: Refused) -> None:
        """The transaction goes no further: fenced, timed out, ended by an administrator, or the id has expired."""
        match refused.code:
            case ErrorCode.PRODUCER_FENCED:
                raise FencedError
            case ErrorCode.INVALID_PRODUCER_ID_MAPPING | ErrorCode.OUTCOME_EXPIRED:
                raise StartOverError
            case ErrorCode.TRANSACTION_ABORTABLE if self._rng.random() < 0.7:
                raise SpoiltError
            case ErrorCode.TRANSACTION_ABORTABLE:
                raise StartOverError(self._grant)
            case ErrorCode.INVALID_TXN_STATE if refused.outcome is not None:
                raise StartOverError(self._grant)
            case _:
                self._unexpected(command, refused)

    # --- a transaction ------------------------------------------------------------------------------------------

    async def _transaction(self) -> None:
        rng, habits = self._rng, self._habits
        await asyncio.sleep(habits.pause_max_s * rng.random())
        draft = Draft(items=min(rng.randint(1, 3), self.job.items - self._position), begun_s=self._world.loop.time())
        values = self._values(draft.items)
        if rng.random() < 0.1:
            # Nothing to write for these items: a commit of the resume token alone.
            values = []
        where = {value: rng.choice(habits.partitions) for value in values}
        groups = frozenset({self._group}) if habits.commits_offsets and rng.random() < 0.5 else frozenset()
        if not values and not groups and not self.job.resumable:
            self._position += draft.items
            return
        await self._register(frozenset(where.values()), groups, draft)
        is_whole = await self._write(draft, where, with_offsets=bool(groups))
        await asyncio.sleep(habits.dwell_max_s * rng.random())
        commit = is_whole and rng.random() >= habits.aborts
        if commit and self.job.two_phase and (self._registered or self._groups) and rng.random() < 0.5:
            await self._prepare_and_end(draft)
        elif commit:
            await self._end(Result.COMMITTED, self._contents(draft), draft.items)
        elif not is_whole and rng.random() < 0.5:
            # As good as an abort: the next grant, for the one that this transaction had.
            raise StartOverError(self._grant)
        elif self._registered or self._groups:
            await self._end(Result.ABORTED, NOTHING, 0)

    def _values(self, items: int) -> list[str]:
        values = []
        for item in range(self._position, self._position + items):
            for copy in range(1 + item % 2):
                self._serial += 1
                attempt = f"{self.name}/{self._serial}"
                identity = f"{self.job.transactional_id}/{item}/{copy}" if self.job.resumable else attempt
                values.append(f"{identity}#{attempt}")
        return values

    async def _register(
        self, partitions: frozenset[TopicPartition], groups: frozenset[GroupPartition], draft: Draft
    ) -> None:
        """All that will be written to. What the last end has chained is registered already."""
        is_chained = bool(self._registered or self._groups)
        # A chained transaction that expired before it was begun is replaced without an error.
        begun_ms_ago = None if is_chained else 0
        while not (partitions <= self._registered and groups <= self._groups):
            command = Register(
                transactional_id=self.job.transactional_id,
                grant=self._grant,
                partitions=partitions - self._registered,
                groups=groups - self._groups,
                begun_ms_ago=begun_ms_ago,
            )
            self._look_at(command.partitions)
            answer = await self._caller.call(command)
            if isinstance(answer, Refused):
                self._refused(command, answer)
            elif isinstance(answer.reply, Registered):
                if answer.reply.grant != self._grant:
                    # The grant was renewed: what had been chained to the old one is not registered.
                    self._take(answer.reply.grant)
                # It had to be created first.
                self._look_at(frozenset(p for p in command.partitions if self._incarnations[p] == NO_TOPIC))
                self._registered |= command.partitions
                self._groups |= command.groups
        if is_chained:
            heartbeat = Heartbeat(
                transactional_id=self.job.transactional_id,
                grant=self._grant,
                begun_ms_ago=int((self._world.loop.time() - draft.begun_s) * 1000),
            )
            self.process.spawn(self._caller.notify(heartbeat))

    async def _write(self, draft: Draft, where: dict[str, TopicPartition], *, with_offsets: bool) -> bool:
        """Whether everything was acknowledged."""
        is_whole = True
        for value, partition in where.items():
            is_whole = is_whole and await self._append(draft, partition, value)
            if self._habits.dwell_max_s > 1:
                await asyncio.sleep(self._habits.dwell_max_s * self._rng.random())
        if with_offsets and is_whole:
            draft.with_offsets = True
            value = f"{self.name}/{self._grant.number}/offsets#{self._serial}"
            is_whole = await self._append(draft, TopicPartition(OFFSETS_TOPIC, self._group.partition), value)
        return is_whole

    async def _append(self, draft: Draft, partition: TopicPartition, value: str) -> bool:
        """Whether it was acknowledged, be it by a topic made again under the name of the one that is registered."""
        world, grant = self._world, self._grant
        key = (grant.producer_id, grant.epoch, partition)
        sequence = NO_SEQUENCE if partition.topic == OFFSETS_TOPIC else self._sequences.get(key, 0)
        give_up_s = world.loop.time() + WRITE_PATIENCE_S
        while world.loop.time() < give_up_s:
            led = world.cluster.led.get(wire.TopicPartition(*partition))
            if led is not None:
                try:
                    appended = await world.cluster.produce(
                        led.leader_id,
                        led.where,
                        registered=self._incarnations.get(partition, ""),
                        producer_id=grant.producer_id,
                        epoch=grant.epoch,
                        sequence=sequence,
                        records=[value],
                        transactional=True,
                        timeout_s=WRITE_TIMEOUT_S,
                    )
                except NoAnswerError:
                    continue
                if appended.error is wire.ErrorCode.NONE:
                    self._sequences[key] = sequence + 1
                    self._appended(draft, partition, appended.partition, appended.offset, value)
                    return True
                if not appended.error.retriable:
                    return False
            await asyncio.sleep(0.1)
        return False

    def _appended(self, draft: Draft, partition: TopicPartition, name: str, offset: int, value: str) -> None:
        if partition.topic != OFFSETS_TOPIC:
            self._world.recorder.acknowledged(self.name, self.job.transactional_id, self._grant, name, offset, value)
            draft.sent.setdefault(partition, []).append(offset)

    # --- its end ------------------------------------------------------------------------------------------------

    def _contents(self, draft: Draft) -> Contents:
        written = tuple(
            Written(
                topic=partition.topic,
                partition=partition.partition,
                record_count=len(sent),
                runs=tuple(_runs(sorted(sent))),
            )
            for partition, sent in sorted(draft.sent.items())
        )
        offsets = GroupOffset(topic="source", partition=0, offset_next=self._position + draft.items)
        return Contents(
            written=written,
            group_offsets=(GroupOffsets(group_id=self._group.group_id, offsets=(offsets,)),)
            if draft.with_offsets
            else (),
            metadata=b"%d" % (self._position + draft.items) if self.job.resumable else b"",
        )

    async def _prepare_and_end(self, draft: Draft) -> None:
        """As oncebox.atomic() does: the token's row, the preparation, the database's COMMIT, the end."""
        habits, rng = self._habits, self._rng
        session = self._world.database.connect()
        try:
            await session.execute(
                "commit_token", {"transactional_id": self.job.transactional_id, "number": self._grant.number}
            )
        except NoAnswerError:
            session.close()
            await self._end(Result.ABORTED, NOTHING, 0)
            return
        command = Prepare(transactional_id=self.job.transactional_id, grant=self._grant, contents=self._contents(draft))
        answer = await self._caller.call(command)
        if isinstance(answer, Refused):
            session.close()
            self._refused(command, answer)
        await asyncio.sleep(habits.commit_late_max_s * rng.random())
        if rng.random() < 0.7:
            committed = await self._commit_database(session)
            await asyncio.sleep(habits.commit_late_max_s * rng.random())
        else:
            # The application gives up: the database is not asked to commit, so it never will.
            session.close()
            committed = False
        await self._end(Result.COMMITTED if committed else Result.ABORTED, NOTHING, draft.items if committed else 0)

    async def _commit_database(self, session: Session) -> bool:
        """Whether it has committed; where that is not told, as a resolver decides."""
        try:
            await session.commit()
        except (NoAnswerError, DatabaseError):
            return await settle(self._world.database, self.job.transactional_id, self._grant.number)
        return True

    async def _resolve(self, grant: Grant) -> None:
        """Decides what a former owner has left PREPARED."""
        self._grant = grant
        committed = await settle(self._world.database, self.job.transactional_id, grant.number)
        await self._end(Result.COMMITTED if committed else Result.ABORTED, NOTHING, 0)

    async def _end(self, result: Result, contents: Contents, items: int) -> None:
        habits, rng = self._habits, self._rng
        chained: frozenset[TopicPartition] = frozenset()
        groups: frozenset[GroupPartition] = frozenset()
        if habits.chains and rng.random() < 0.8:
            chained = frozenset(rng.choices(habits.partitions, k=2))
            groups = frozenset({self._group}) if habits.commits_offsets else frozenset()
        command = End(
            transactional_id=self.job.transactional_id,
            grant=self._grant,
            result=result,
            contents=contents,
            decided_is_enough=habits.decided_is_enough,
            next_partitions=chained,
            next_groups=groups,
        )
        self._look_at(chained)
        answer = await self._caller.call(command)
        if isinstance(answer, Refused):
            self._refused(command, answer)
        elif isinstance(answer.reply, Ended):
            self._position += items
            if answer.reply.next_grant is None:
                # It was found prepared, here or meanwhile by another: who may go on, the claim on the next one tells.
                raise StartOverError(self._grant)
            self._take(answer.reply.next_grant)
            if answer.reply.next_registered:
                self._registered, self._groups = chained, groups


def _runs(offsets: list[int]) -> list[Run]:
    runs: list[Run] = []
    for offset in offsets:
        if runs and runs[-1].offset_next == offset:
            runs[-1] = Run(runs[-1].offset_first, offset + 1)
        else:
            runs.append(Run(offset, offset + 1))
    return runs
