"""A transaction between several tasks, and one whose end was not answered."""

import asyncio
from typing import Any

import pytest

from oncebox import writer as writing
from oncebox.bulk import Outgoing
from oncebox.claim import Claim, ProducerSettings, Registered
from oncebox.errors import AbortedError, CoordinatorError, RetriableError, UsageError, error_from
from oncebox.transaction import State, Tools, Transaction
from oncebox.v1 import coordinator_pb2, transaction_pb2
from oncebox.wire import TopicPartition
from tests.unit.client.brokers import Brokers

WHERE = TopicPartition("t", 0)
NOBODY = transaction_pb2.Error(code=transaction_pb2.COORDINATOR_NOT_AVAILABLE, retriable=True)


class Coordinator:
    """Stands in for a session: decides once, and answers an end as often as it is asked for."""

    def __init__(self) -> None:
        self.number = 1
        self.outcomes: dict[int, transaction_pb2.Outcome] = {}
        # Of the next calls that end a transaction: what is lost on the way there, or on the way back.
        self.lost: list[str] = []
        self.refusal: transaction_pb2.Error | None = None
        self.ends: list[coordinator_pb2.EndRequest] = []
        self.prepared: list[coordinator_pb2.PrepareRequest] = []
        self.is_away = False
        # What is prepared is answered once it is open.
        self.gate = asyncio.Event()
        self.gate.set()

    def grant(self) -> transaction_pb2.Grant:
        return transaction_pb2.Grant(number=self.number, producer_id=self.number, epoch=1)

    async def call(self, _transactional_id: str, name: str, request: Any, *, timeout_s: float) -> Any:
        del timeout_s
        if name == "init_producer":
            if self.number not in self.outcomes:
                self._decide(transaction_pb2.ABORTED)
            return coordinator_pb2.InitProducerResponse(grant=self.grant())
        if name == "add_partitions":
            if self.is_away:
                raise error_from(NOBODY)
            return coordinator_pb2.AddPartitionsResponse(grant=request.grant)
        if name == "add_offsets":
            return coordinator_pb2.AddOffsetsResponse(grant=request.grant)
        if name == "prepare":
            self.prepared.append(request)
            await self.gate.wait()
            if self.is_away:
                raise error_from(NOBODY)
            return coordinator_pb2.PrepareResponse()
        assert name == "end"
        self.ends.append(request)
        lost = self.lost.pop(0) if self.lost else ""
        if lost == "request":
            raise error_from(NOBODY)
        if self.refusal is not None:
            raise error_from(self.refusal)
        if request.grant.number == self.number:
            self._decide(request.result)
        if lost == "answer":
            raise error_from(NOBODY)
        outcome = self.outcomes[request.grant.number]
        if outcome.result != request.result:
            raise error_from(transaction_pb2.Error(code=transaction_pb2.INVALID_TXN_STATE, outcome=outcome))
        return coordinator_pb2.EndResponse(outcome=outcome, next=self.grant())

    def _decide(self, result: "transaction_pb2.Result") -> None:
        self.outcomes[self.number] = transaction_pb2.Outcome(number=self.number, result=result)
        self.number += 1


class Places:
    """Stands in for Placement: what is looked up is found once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    def place(self, topic: str, _key: bytes | None, _partition: int | None) -> TopicPartition | None:
        return WHERE if topic == "t" else None

    async def find(self, topic: str, _key: bytes | None, _partition: int | None) -> TopicPartition:
        await self.gate.wait()
        return TopicPartition(topic, 0)


class Groups:
    """Stands in for GroupOffsets: answered once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def send(self, *_: Any) -> None:
        await self.gate.wait()


class World:
    def __init__(self) -> None:
        self.groups = Groups()
        self.coordinator = Coordinator()
        self.brokers = Brokers(1, trouble=0)
        self.places = Places()
        self.claim = Claim(self.coordinator, "teller", ProducerSettings())  # type: ignore[arg-type]
        groups: Any = self.groups
        wire: Any = self.brokers
        places: Any = self.places
        self.tools = Tools(
            claim=self.claim,
            settings=ProducerSettings(),
            wire=wire,
            placement=places,
            offsets=groups,
            on_state=lambda _: None,
        )

    async def begin(self) -> Transaction:
        async with self.claim.turn:
            await self.claim.settle()
            return Transaction(self.tools, self.claim.grant, Registered())

    @property
    def written(self) -> list[bytes]:
        return [value for log in self.brokers.logs.values() for value in log.values]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(writing, "RETRY_FIRST_S", 0.000_1)
    found = World()
    found.coordinator.outcomes[0] = transaction_pb2.Outcome()
    await found.claim.take()
    return found


@pytest.mark.parametrize("end", ["commit", "abort"])
async def test_records_that_are_placed_while_the_transaction_ends_are_not_sent(world: World, end: str) -> None:
    transaction = await world.begin()
    await transaction.send_many([Outgoing("t", b"before")])
    world.places.gate.clear()
    late = asyncio.create_task(transaction.send_many([Outgoing("t", b"late"), Outgoing("elsewhere", b"late")]))
    await asyncio.sleep(0)
    await getattr(transaction, end)()
    world.places.gate.set()
    with pytest.raises(UsageError, match="has ended"):
        await late
    await asyncio.sleep(0.01)
    assert b"late" not in world.written


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_a_commit_in_doubt_may_be_asked_for_again(world: World, lost: str) -> None:
    transaction = await world.begin()
    await transaction.send("t", b"once")
    world.coordinator.lost = [lost, lost]
    for _ in range(2):
        with pytest.raises(RetriableError):
            await transaction.commit(metadata=b"cursor")
        assert transaction.state is State.IN_DOUBT
    outcome = await transaction.commit()
    assert outcome is not None
    assert (outcome.number, outcome.result) == (transaction.number, transaction_pb2.COMMITTED)
    first, *repeats = world.coordinator.ends
    assert first.contents.metadata == b"cursor"
    assert all(repeat == first for repeat in repeats)
    assert world.claim.resume_token == b"cursor"
    assert (await world.begin()).number == transaction.number + 1
    with pytest.raises(UsageError, match="has ended"):
        await transaction.commit()
    assert world.written == [b"once"]


async def test_a_commit_that_is_cancelled_before_its_first_step_is_under_way_no_longer(world: World) -> None:
    """Nobody would hear of it: neither the transaction begun behind it, nor a producer that is to be stopped."""
    transaction = await world.begin()
    await transaction.send("t", b"once")
    soon = transaction.commit_soon()
    committing = transaction.committing
    assert committing is not None
    soon.cancel()
    async with asyncio.timeout(10):
        assert await committing is False
    assert (transaction.committing, transaction.state) == (None, State.OPEN)
    await transaction.commit()
    assert world.written == [b"once"]


async def test_an_abort_in_doubt_may_be_asked_for_again_and_is_not_turned_into_a_commit(world: World) -> None:
    transaction = await world.begin()
    await transaction.send_and_wait("t", b"never")
    world.coordinator.lost = ["request"]
    with pytest.raises(RetriableError):
        await transaction.abort()
    with pytest.raises(AbortedError):
        await transaction.commit()
    outcome = await transaction.abort()
    assert outcome is not None
    assert outcome.result == transaction_pb2.ABORTED


async def test_once_the_next_has_been_begun_the_former_is_not_asked_for_again(world: World) -> None:
    transaction = await world.begin()
    await transaction.send("t", b"never")
    world.coordinator.lost = ["request"]
    with pytest.raises(RetriableError):
        await transaction.commit()
    following = await world.begin()
    with pytest.raises(UsageError, match="has ended"):
        await transaction.commit()
    await following.send("t", b"next")
    await following.commit()
    assert world.coordinator.outcomes[transaction.number].result == transaction_pb2.ABORTED
    assert world.coordinator.outcomes[following.number].result == transaction_pb2.COMMITTED


async def test_a_grant_whose_commit_was_refused_after_a_doubt_is_not_used_again(world: World) -> None:
    transaction = await world.begin()
    await transaction.send("t", b"never")
    world.coordinator.lost = ["request"]
    with pytest.raises(RetriableError):
        await transaction.commit()
    world.coordinator.refusal = transaction_pb2.Error(code=transaction_pb2.TRANSACTION_ABORTABLE)
    with pytest.raises(CoordinatorError):
        await transaction.commit()
    world.coordinator.refusal = None
    assert (await world.begin()).number > transaction.number


@pytest.mark.parametrize("refused", [False, True])
async def test_what_becomes_of_an_older_one_settles_no_doubt_of_a_newer(world: World, refused: bool) -> None:
    """Its grant has written already: who wrote under it anew would be taken for a repeat, and lose all of it."""
    older = await world.begin()
    await older.send("t", b"older")
    world.coordinator.lost = ["request"]
    with pytest.raises(RetriableError):
        await older.commit()
    newer = await world.begin()
    await newer.send("t", b"newer")
    world.coordinator.lost = ["request"]
    with pytest.raises(RetriableError):
        await newer.commit()
    if refused:
        world.coordinator.refusal = transaction_pb2.Error(code=transaction_pb2.OUTCOME_EXPIRED)
        with pytest.raises(CoordinatorError):
            await older.abort()
        world.coordinator.refusal = None
    else:
        await older.abort()
    assert (await world.begin()).number > newer.number


async def test_a_commit_that_is_cancelled_while_another_is_asked_about_has_used_its_grant(world: World) -> None:
    older = await world.begin()
    await older.send("t", b"older")
    world.coordinator.lost = ["request"]
    with pytest.raises(RetriableError):
        await older.commit()
    newer = await world.begin()
    await newer.send_and_wait("t", b"newer")
    async with world.claim.turn:
        committing = asyncio.create_task(newer.commit())
        async with asyncio.timeout(10):
            while newer.state is not State.IN_DOUBT:  # noqa: ASYNC110 - in memory
                await asyncio.sleep(0)
        committing.cancel()
        await asyncio.wait([committing])
    assert (await world.begin()).number > newer.number


@pytest.mark.parametrize("code", [transaction_pb2.INVALID_TXN_STATE, transaction_pb2.PRODUCER_FENCED])
async def test_whatever_is_heard_of_a_commit_in_doubt_its_end_tells_the_outcome(
    world: World, code: "transaction_pb2.ErrorCode"
) -> None:
    transaction = await world.begin()
    await transaction.send("t", b"once")
    world.coordinator.lost = ["answer"]
    with pytest.raises(RetriableError):
        await transaction.commit()
    # As a heartbeat that comes after the decision, or a newer instance, makes it known.
    transaction.fail(error_from(transaction_pb2.Error(code=code)))
    outcome = await transaction.commit()
    assert outcome is not None
    assert outcome.result == transaction_pb2.COMMITTED


async def test_a_registration_that_is_not_answered_leaves_a_transaction_to_abort(world: World) -> None:
    transaction = await world.begin()
    world.coordinator.is_away = True
    await transaction.send("t", b"never")
    for _ in range(2):
        with pytest.raises(AbortedError, match="registered") as caught:
            await transaction.commit()
        assert isinstance(caught.value.__cause__, RetriableError)
        world.coordinator.is_away = False
    await transaction.abort()
    assert world.written == []
    assert (await world.begin()).number == transaction.number + 1


async def test_nothing_is_sent_while_it_is_being_prepared(world: World) -> None:
    transaction = await world.begin()
    await transaction.send("t", b"told")
    world.coordinator.gate.clear()
    preparing = asyncio.create_task(transaction.prepare())
    async with asyncio.timeout(60):
        while not world.coordinator.prepared:  # noqa: ASYNC110 - in memory
            await asyncio.sleep(0)
    with pytest.raises(UsageError, match="being prepared"):
        await transaction.send("t", b"late")
    world.coordinator.gate.set()
    await preparing
    assert transaction.state is State.PREPARED
    await transaction.commit()
    assert world.written == [b"told"]


async def test_what_may_be_prepared_can_be_prepared_committed_or_aborted(world: World) -> None:
    for last in ("prepare", "commit", "abort"):
        transaction = await world.begin()
        await transaction.send("t", b"told")
        world.coordinator.is_away = False
        await transaction.flush()
        world.coordinator.is_away = True
        with pytest.raises(RetriableError):
            await transaction.prepare(metadata=b"cursor")
        assert transaction.is_unprepared
        assert transaction.is_open
        with pytest.raises(UsageError, match="being prepared"):
            await transaction.send("t", b"late")
        world.coordinator.is_away = False
        await getattr(transaction, last)()
        if last == "prepare":
            assert world.coordinator.prepared[-1] == world.coordinator.prepared[-2]
            await transaction.commit()
        result = transaction_pb2.ABORTED if last == "abort" else transaction_pb2.COMMITTED
        assert world.coordinator.outcomes[transaction.number].result == result
    assert b"late" not in world.written


async def test_a_commit_waits_for_offsets_that_are_under_way(world: World) -> None:
    transaction = await world.begin()
    sending = asyncio.create_task(transaction.send_offsets({WHERE: 5}, "readers"))
    await asyncio.sleep(0.01)
    committing = asyncio.create_task(transaction.commit())
    await asyncio.sleep(0.01)
    assert world.coordinator.ends == []
    world.groups.gate.set()
    await committing
    await asyncio.gather(sending, return_exceptions=True)
    [asked] = world.coordinator.ends
    assert [each.group_id for each in asked.contents.group_offsets] == ["readers"]
