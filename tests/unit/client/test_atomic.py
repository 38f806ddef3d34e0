"""A commit over Kafka and a database when the coordinator does not answer, in memory."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import oncebox
from oncebox import atomic_commit
from oncebox.atomic_commit import TornError
from oncebox.claim import Claim, ProducerSettings
from oncebox.errors import CoordinatorNotAvailableError, ProducerFencedError, UsageError, error_from
from oncebox.producer import Producer, _prepared
from oncebox.v1 import coordinator_pb2, transaction_pb2
from tests.unit.client.test_transaction import Coordinator, World


class Database:
    """Stands in for a connection and for every other one to the same database."""

    def __init__(self) -> None:
        self.is_in_transaction = False
        self.steps: list[str] = []
        self.decided: dict[object, str] = {}

    def in_transaction(self) -> bool:
        return self.is_in_transaction

    async def begin(self) -> None:
        self.is_in_transaction = True

    def flush(self) -> None:
        pass

    async def execute(self, name: str, values: Mapping[str, object]) -> list[tuple[str]]:
        if name == "abort_token":
            return [(self.decided.setdefault(values["number"], "aborted"),)]
        return [("this database",)]

    async def commit(self) -> None:
        self.steps.append("commit")
        self.is_in_transaction = False

    async def rollback(self) -> None:
        self.steps.append("rollback")
        self.is_in_transaction = False

    def another(self) -> "Database":
        made = Database()
        made.decided = self.decided
        return made

    async def close(self) -> None:
        pass

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds)


class Chaining(Coordinator):
    """Registers ahead what it is asked to."""

    async def call(self, transactional_id: str, name: str, request: Any, *, timeout_s: float) -> Any:
        response = await super().call(transactional_id, name, request, timeout_s=timeout_s)
        if name == "end":
            response.next_registered = bool(request.next_partitions)
        return response


class Shared(Coordinator):
    """Has a transaction that another instance has prepared; None: all are decided."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: int | None = 7
        # Who takes the id over as soon as that is decided.
        self.following: transaction_pb2.Owner | None = None
        self.owner: transaction_pb2.Owner | None = None
        self.claims: list[int] = []

    async def call(self, _transactional_id: str, name: str, request: Any, *, timeout_s: float) -> Any:
        del timeout_s
        grant = transaction_pb2.Grant(number=self.waiting or 9, producer_id=1, epoch=2 * (self.waiting or 9))
        if name == "init_producer":
            self.claims.append(request.grant.number)
            if self.owner is not None and request.HasField("grant"):
                raise error_from(transaction_pb2.Error(code=transaction_pb2.PRODUCER_FENCED, owner=self.owner))
            if self.waiting is None:
                return coordinator_pb2.InitProducerResponse(grant=grant)
            token = atomic_commit.wrap_metadata("this database", b"")
            prepared = coordinator_pb2.PreparedTransaction(grant=grant, resume_token=token)
            return coordinator_pb2.InitProducerResponse(prepared=prepared)
        if name == "add_partitions" and self.waiting is not None:
            raise error_from(transaction_pb2.Error(code=transaction_pb2.INVALID_TXN_STATE, message="PREPARED"))
        if name == "end":
            # To the one who found it no grant is given for the next.
            self.ends.append(request)
            self.waiting, self.owner = None, self.following
            outcome = transaction_pb2.Outcome(number=request.grant.number, result=request.result)
            return coordinator_pb2.EndResponse(outcome=outcome)
        return coordinator_pb2.AddPartitionsResponse(grant=request.grant)


class Service:
    """A producer that has its transactional id, and the database that it works with."""

    def __init__(self, coordinator: Coordinator) -> None:
        settings = ProducerSettings(keep_prepared=True)
        self.coordinator = coordinator
        self.producer = Producer("127.0.0.1:1", "127.0.0.1:1", transactional_id="teller", settings=settings)
        self.claim = Claim(coordinator, "teller", settings)  # type: ignore[arg-type]
        self.world = World()
        self.tools = replace(self.world.tools, claim=self.claim, on_state=self.producer._changed)
        self.producer._tools, self.producer._is_running = self.tools, True
        self.database = Database()

    async def transfer(self, *records: bytes) -> None:
        async with oncebox.atomic(self.producer, self.database) as (transaction, _):
            for record in records:
                await transaction.send("t", record)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(atomic_commit, "database_of", lambda connection, **_: connection)
    coordinator = Chaining()
    coordinator.outcomes[0] = transaction_pb2.Outcome()
    made = Service(coordinator)
    await made.claim.take()
    return made


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_the_database_alone_has_committed_whatever_the_coordinator_says(service: Service, lost: str) -> None:
    """Told of a failure, the caller would do its work in the database again."""
    await service.transfer(b"first")
    assert service.claim.has_registered_ahead
    service.coordinator.lost = [lost]
    await service.transfer()
    assert service.coordinator.lost == []
    assert service.database.steps == ["commit", "commit"]
    await service.transfer(b"third")
    assert service.world.written == [b"first", b"third"]
    results = [outcome.result for outcome in service.coordinator.outcomes.values()]
    assert results.count(transaction_pb2.COMMITTED) == 2


@pytest.fixture
async def guest(monkeypatch: pytest.MonkeyPatch) -> Service:
    """Decides what a dead instance has left, and may go on."""
    monkeypatch.setattr(atomic_commit, "database_of", lambda connection, **_: connection)
    made = Service(Shared())
    made.producer._transaction = _prepared(made.tools, await made.claim.take())
    return made


NEWER = transaction_pb2.Owner(instance="newer", number_first=8)


async def test_who_has_decided_what_it_found_goes_on_by_its_grant(guest: Service) -> None:
    """Without one it would be a new start, which takes the id from whoever has come since."""
    coordinator: Any = guest.coordinator
    assert await oncebox.recover(guest.producer, guest.database) == "aborted"
    await guest.transfer(b"mine")
    assert coordinator.claims == [0, 7]
    assert [(end.grant.number, end.result) for end in coordinator.ends] == [
        (7, transaction_pb2.ABORTED),
        (9, transaction_pb2.COMMITTED),
    ]


async def test_what_was_found_and_is_not_decided_is_not_begun_over(guest: Service) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="recover"):
            await guest.transfer(b"too early")
    assert guest.coordinator.ends == []
    assert await oncebox.recover(guest.producer, guest.database) == "aborted"
    await (await guest.producer.begin()).abort()


async def test_whom_a_newer_instance_has_followed_leaves_the_id_to_it(guest: Service) -> None:
    """Ours has not heard that it is fenced."""
    coordinator: Any = guest.coordinator
    assert await oncebox.recover(guest.producer, guest.database) == "aborted"
    coordinator.waiting, coordinator.owner = 8, NEWER
    for _ in range(2):
        with pytest.raises(ProducerFencedError) as fenced:
            await guest.transfer(b"late")
        assert fenced.value.owner == NEWER
    assert await oncebox.recover(guest.producer, guest.database) is None
    assert [end.grant.number for end in coordinator.ends] == [7]


async def test_one_begun_ahead_is_not_granted_over_a_newer_instance(guest: Service) -> None:
    coordinator: Any = guest.coordinator
    assert guest.producer.prepared is not None
    coordinator.following = NEWER
    committing = guest.producer.prepared.commit_soon()
    ahead = await guest.producer.begin()
    await ahead.send("t", b"late")
    await committing
    with pytest.raises(ProducerFencedError):
        await ahead.commit()
    await ahead.abort()
    assert [end.grant.number for end in coordinator.ends] == [7]
    with pytest.raises(ProducerFencedError):
        await guest.producer.begin()


async def test_what_was_found_is_decided_by_who_is_fenced_as_well(guest: Service) -> None:
    """The row decides, whoever asks: only the next is not for us to begin."""
    found = guest.producer.prepared
    assert found is not None
    error = error_from(transaction_pb2.Error(code=transaction_pb2.PRODUCER_FENCED, owner=NEWER))
    guest.claim.error = error
    found.fail(error)
    guest.database.decided[7] = "committed"
    assert await oncebox.recover(guest.producer, guest.database) == "committed"
    assert [(end.grant.number, end.result) for end in guest.coordinator.ends] == [(7, transaction_pb2.COMMITTED)]
    with pytest.raises(ProducerFencedError):
        await guest.producer.begin()


async def test_what_may_be_prepared_is_decided_by_recovering(service: Service) -> None:
    """Neither its preparation nor its abort is answered: it must not stand in the way until the next start."""
    with pytest.raises(CoordinatorNotAvailableError):  # noqa: PT012 - the block is what is tested
        async with oncebox.atomic(service.producer, service.database) as (transaction, _):
            await transaction.send("t", b"never")
            await transaction.flush()
            service.coordinator.is_away = True
            service.coordinator.lost = ["request"]
    service.coordinator.is_away = False
    with pytest.raises(UsageError, match="recover"):
        await service.transfer(b"too early")
    assert await oncebox.recover(service.producer, service.database) == "aborted"
    assert service.database.decided == {transaction.number: "aborted"}
    assert service.coordinator.outcomes[transaction.number].result == transaction_pb2.ABORTED
    await service.transfer(b"next")
    assert service.database.steps[-1] == "commit"


async def test_what_an_administrator_aborts_does_not_follow(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database commits: nothing waits for a decision any more, and nobody would send it again."""
    commit = Database.commit

    async def aborted_meanwhile(database: Database) -> None:
        await commit(database)
        service.coordinator._decide(transaction_pb2.ABORTED)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "commit", aborted_meanwhile)
        with pytest.raises(TornError, match="send it again"):
            await service.transfer(b"never seen")
    assert await oncebox.recover(service.producer, service.database) is None
    await service.transfer(b"again")
    assert service.database.steps == ["commit", "commit"]
