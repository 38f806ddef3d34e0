"""Many records with one call: all or none, and their offsets without a future for each."""

from array import array
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple

import pytest

from oncebox import writer as writing
from oncebox.bulk import Outgoing, Receipt, buffer_many, place_many
from oncebox.errors import RecordTooLargeError, UnknownTopicError, UsageError
from oncebox.partition_queue import Identity
from oncebox.wire import TopicPartition
from oncebox.writer import Writer
from oncebox.writer_settings import WriterSettings
from tests.unit.client.brokers import Brokers

IDENTITY = Identity(producer_id=7, epoch=4, transactional_id="t")


class Names(StrEnum):
    A = "a"


class Named(NamedTuple):
    name: str
    value: bytes


class Places:
    """Stands in for Placement: a topic with six partitions."""

    def place(self, topic: str, key: bytes | None, partition: int | None) -> TopicPartition | None:
        return TopicPartition(topic, partition or 0) if topic == "t" else None

    async def find(self, topic: str, key: bytes | None, partition: int | None) -> TopicPartition:
        raise UnknownTopicError(topic)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "RETRY_FIRST_S", 0.000_1)
    monkeypatch.setattr(writing, "RETRY_MAX_S", 0.001)


def writer(brokers: Brokers, **settings: Any) -> Writer:
    wire: Any = brokers
    return Writer(wire, WriterSettings(**{"batch_bytes": 300, "request_bytes": 600, **settings}), IDENTITY)


async def buffer(one: Writer, records: list[Outgoing]) -> Receipt:
    places: Any = Places()
    return buffer_many(one, await place_many(one, places, records), records)


@pytest.mark.parametrize("seed", range(50))
async def test_every_record_is_told_its_own_offset(seed: int):
    random = Random(seed)
    brokers = Brokers(seed, trouble=random.choice([0.0, 0.3]))
    one = writer(brokers)
    receipts = []
    for turn in range(20):
        count = random.randint(1, 30)
        records = [Outgoing("t", b"%d/%d" % (turn, i), partition=random.randrange(3)) for i in range(count)]
        receipts.append((records, await buffer(one, records)))
        if random.random() < 0.5:
            await one.room()
        # Others write to the same partitions between our batches.
        if random.random() < 0.3 and brokers.logs:
            random.choice(list(brokers.logs.values())).values.append(b"another's")
        if random.random() < 0.2:
            await receipts[-1][1].metadata()
    await one.flush()
    for records, receipt in receipts:
        for record, where in zip(records, await receipt.metadata(), strict=True):
            assert brokers.logs[TopicPartition(where.topic, where.partition)].values[where.offset] == record.value


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Outgoing("t", "text"), TypeError),  # type: ignore[arg-type]
        (Outgoing("t", b"x", key=5), TypeError),  # type: ignore[arg-type]
        (Outgoing("t", b"x", headers=[("a", "text")]), TypeError),  # type: ignore[list-item]
        (Outgoing("t", b"x", headers=[(b"a", b"1")]), AttributeError),  # type: ignore[list-item]
        (Outgoing("t", b"x", headers=[("a", bytearray(b"1"))]), TypeError),  # type: ignore[list-item]
        (Outgoing("t", b"x", headers=[("a", memoryview(b"1"))]), TypeError),  # type: ignore[list-item]
        (Outgoing("t", b"x", headers=[["a", b"1"]]), TypeError),  # type: ignore[list-item]
        (Outgoing("t", b"x", headers=[Named("a", b"1")]), TypeError),
        (Outgoing("t", b"x", headers=[(Names.A, b"1")]), TypeError),
        (Outgoing("t", memoryview(b"xyz")[::2]), TypeError),  # type: ignore[arg-type]
        (Outgoing("t", memoryview(array("q", [0] * 75))), RecordTooLargeError),  # type: ignore[arg-type]
        (Outgoing("t", bytes(600)), RecordTooLargeError),
        (Outgoing("t", b"x", timestamp_ms=-1), UsageError),
        (Outgoing("t", b"x", timestamp_ms=2**63), UsageError),
        (Outgoing("elsewhere", b"x"), UnknownTopicError),
    ],
)
async def test_one_bad_record_and_none_is_buffered(bad: Outgoing, error: type[Exception]):
    brokers = Brokers(1, trouble=0)
    one = writer(brokers)
    with pytest.raises(error):
        await buffer(one, [Outgoing("t", b"good"), bad])
    assert one.buffered_bytes == 0
    await one.flush()
    assert not brokers.logs


async def test_what_the_check_lets_pass_always_fits():
    """The size is estimated before anything is buffered: never too low, or a part of the records would stay."""
    brokers = Brokers(1, trouble=0)
    random = Random(3)
    for _ in range(300):
        one = writer(brokers)
        headers = [("h" * random.randrange(20), bytes(random.randrange(20))) for _ in range(random.randrange(4))]
        record = Outgoing("t", bytes(random.randrange(700)), bytes(random.randrange(50)), headers)
        try:
            await buffer(one, [record])
        except RecordTooLargeError as error:
            assert "a record to t needs" in str(error)  # noqa: PT017 - the check's words, not the writer's
        await one.flush()
