"""The blocking facade: the same names and the same promises, without a line of asyncio in the caller."""

import inspect
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import oncebox
from oncebox import blocking, producer
from oncebox.bulk import Outgoing
from oncebox.errors import ClosedError, UsageError
from oncebox.reader import Position
from oncebox.transaction import State
from oncebox.v1 import transaction_pb2
from tests.integration.client.conftest import fresh
from tests.support.coordinator import Coordinators, values, wait_for_markers
from tests.support.kafka import TopicFactory


@pytest.fixture
def mine(one: Coordinators) -> Iterator[blocking.Producer]:
    with blocking.Producer(one.bootstrap_servers, one.addresses, transactional_id=fresh("blocking")) as mine:
        yield mine


def test_the_names_are_the_same():
    for its, ours in ((producer.Producer, blocking.Producer), (producer.Transaction, blocking.Transaction)):
        # Between the client's parts, and what only an event loop can do.
        inner = {"fail", "adopt", "grant", "granted", "not_granted", "has_grant", "is_granted", "has_begun", "room"}
        inner |= {"begun_ms_ago", "is_registered", "buffered_bytes", "next_number"}
        names = {name for name in vars(its) if not name.startswith("_")} - inner
        assert names <= {name for name in dir(ours) if not name.startswith("_")}
        for name in names:
            if inspect.isfunction(getattr(its, name)):
                ours_takes = list(inspect.signature(getattr(ours, name)).parameters)
                assert ours_takes == list(inspect.signature(getattr(its, name)).parameters)


def test_transactions(one: Coordinators, mine: blocking.Producer, new_topic: TopicFactory):
    topic = new_topic(partitions=2)
    with mine.transaction(metadata=b"token") as transaction:
        for number in range(20):
            transaction.send(topic, b"%d" % number, partition=0, key=b"k")
        assert transaction.send_and_wait(topic, b"last", partition=0).offset == 20
    assert mine.resume_token == b"token"
    assert transaction.outcome().result == transaction_pb2.COMMITTED
    with pytest.raises(ZeroDivisionError), mine.transaction() as transaction:  # noqa: PT012 - the block is tested
        transaction.send(topic, b"never")
        raise ZeroDivisionError
    assert transaction.state is State.ENDED
    explicit = mine.begin()
    explicit.send(topic, b"prepared", partition=0)
    assert explicit.prepare() == explicit.name
    assert explicit.commit() is not None
    with pytest.raises(TypeError), mine.transaction() as transaction:
        transaction.send(topic, "text")  # type: ignore[arg-type]
    with mine.transaction() as transaction:
        receipt = transaction.send_many([Outgoing(topic, b"many", partition=0)] * 3)
        assert [where.partition for where in receipt.metadata()] == [0, 0, 0]
    assert mine.outcome_of(transaction.number).result == transaction_pb2.COMMITTED
    seen = values(one.bootstrap_servers, topic)
    assert seen == [*(b"%d" % number for number in range(20)), b"last", b"prepared", *[b"many"] * 3]


def test_several_threads_share_the_one_behind_them(one: Coordinators, new_topic: TopicFactory):
    topic = new_topic()

    def work(number: int) -> None:
        with blocking.Producer(one.bootstrap_servers, one.addresses, transactional_id=fresh("thread")) as mine:
            for turn in range(5):
                with mine.transaction() as transaction:
                    transaction.send(topic, b"%d/%d" % (number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    names = {thread.name for thread in threading.enumerate()}
    for thread in threads:
        thread.join()
    assert sum(name == "oncebox-blocking" for name in names) <= 1
    assert sorted(values(one.bootstrap_servers, topic)) == sorted(b"%d/%d" % (n, t) for n in range(4) for t in range(5))
    assert all(thread.name != "oncebox-blocking" for thread in threading.enumerate())


def test_without_transactions_and_out_of_place(one: Coordinators, new_topic: TopicFactory):
    topic = new_topic()
    mine = blocking.Producer(one.bootstrap_servers)
    with pytest.raises(ClosedError):
        mine.send(topic, b"x")
    with mine:
        mine.send(topic, b"a")
        mine.flush()
        assert mine.send_and_wait(topic, b"b").offset == 1
        with pytest.raises(UsageError):
            mine.begin()
    mine.stop()
    with pytest.raises(ClosedError):
        mine.flush()
    assert values(one.bootstrap_servers, topic) == [b"a", b"b"]


def test_the_next_is_filled_while_the_last_one_ends(
    one: Coordinators, mine: blocking.Producer, new_topic: TopicFactory
):
    topic = new_topic()
    ending = None
    for number in range(5):
        transaction = mine.begin()
        transaction.send(topic, b"%d" % number)
        if ending is not None:
            assert ending.result(60) is not None
        ending = transaction.commit_soon(metadata=b"m%d" % number)
        with pytest.raises(UsageError, match=r"being committed|has ended"):
            transaction.commit_soon()
    assert ending is not None
    outcome = ending.result(60)
    assert outcome is not None
    assert outcome.result == transaction_pb2.COMMITTED
    assert mine.resume_token == b"m4"
    assert values(one.bootstrap_servers, topic) == [b"%d" % number for number in range(5)]


def test_whole_transactions_are_read(one: Coordinators, mine: blocking.Producer, new_topic: TopicFactory):
    topics = [new_topic(), new_topic()]
    for number in range(3):
        with mine.transaction() as transaction:
            for topic in topics:
                transaction.send(topic, b"%d" % number)
    for topic in topics:
        wait_for_markers(one.bootstrap_servers, topic)

    def read(**start: Any) -> tuple[list[list[bytes | None]], Position]:
        with blocking.read_transactions(
            topics, one.bootstrap_servers, until_end=True, feed_topic=one.feed_topic, **start
        ) as reader:
            found = [
                [record.value for records in whole.records.values() for record in records]
                for whole in itertools.islice(reader, 2)
            ]
            return found, reader.position()

    assert inspect.signature(blocking.read_transactions).parameters.keys() == (
        inspect.signature(oncebox.read_transactions).parameters.keys()
    )
    found, position = read()
    assert found == [[b"0", b"0"], [b"1", b"1"]]
    found, position = read(start=position)
    assert found == [[b"2", b"2"]]
    assert read(start=position)[0] == []
    closed = blocking.read_transactions(topics, one.bootstrap_servers)
    with pytest.raises(ClosedError, match="not open"):
        next(closed)
    closed.close()
