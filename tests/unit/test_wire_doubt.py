"""Who is asked for leaders: not first the broker that may have lost touch with the others."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from oncebox.wire import (
    ErrorCode,
    KafkaSettings,
    OutcomeUnknownError,
    TopicPartition,
    TxnMarker,
    Wire,
    client,
    requests,
)

LOG = TopicPartition("log", 0)
MARKER = TxnMarker(producer_id=1, producer_epoch=1, committed=True, partitions=(LOG,), coordinator_epoch=0)
CUT_OFF, NEW_LEADER = 1, 2
METADATA, INIT_PRODUCER_ID, WRITE_TXN_MARKERS = 3, 22, 27


class Cluster:
    """Broker 1 takes itself for the leader still, and has no producer ids left; the others know better."""

    def __init__(self) -> None:
        self.brokers: Any = {1: None, 2: None, 3: None}
        self.topic_id = UUID(int=1)
        self.epochs_back = 0

    async def ask_address(self, *_: Any) -> Any:
        raise OutcomeUnknownError("nowhere")

    async def send(self, node_id: int, _lane: str, call: requests.Call, _timeout_ms: int) -> Any:
        api_key = call.prepare(dict.fromkeys([METADATA, INIT_PRODUCER_ID, WRITE_TXN_MARKERS], (0, 99)))[0].api_key
        if api_key == INIT_PRODUCER_ID:
            error = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if node_id == CUT_OFF else ErrorCode.NONE
            return SimpleNamespace(error_code=error, producer_id=node_id, producer_epoch=0)
        if api_key == WRITE_TXN_MARKERS:
            raise OutcomeUnknownError("no answer")
        leader, epoch = (CUT_OFF, 5) if node_id == CUT_OFF else (NEW_LEADER, 6)
        partition: Any = (0, 0, leader, epoch - self.epochs_back, [1, 2, 3], [1, 2, 3], [], {})
        return SimpleNamespace(
            cluster_id="c",
            controller_id=3,
            brokers=[(each, "host", 1, None, {}) for each in (1, 2, 3)],
            topics=[(ErrorCode.NONE, "log", self.topic_id, False, [partition], 0, {})],
        )


@pytest.fixture
async def wire() -> Wire:
    wire = Wire(KafkaSettings(bootstrap_servers="nowhere:1"))
    cluster: Any = Cluster()
    wire._connections = cluster
    wire._responsive_id = CUT_OFF
    await wire.metadata(["log"], timeout_ms=1_000)
    assert wire.leader_id(LOG) == CUT_OFF
    return wire


async def test_a_broker_in_doubt_is_asked_last(wire: Wire) -> None:
    wire.doubt(CUT_OFF)
    await wire.metadata(["log"], timeout_ms=1_000)
    assert wire.leader_id(LOG) == NEW_LEADER


async def test_whoever_named_a_wrong_leader_is_asked_last(wire: Wire) -> None:
    wire.doubt()
    await wire.metadata(["log"], timeout_ms=1_000)
    assert wire.leader_id(LOG) == NEW_LEADER


async def test_one_that_does_not_answer_a_marker_is_in_doubt(wire: Wire) -> None:
    with pytest.raises(OutcomeUnknownError):
        await wire.write_txn_markers(CUT_OFF, [MARKER], timeout_ms=1_000)
    await wire.metadata(["log"], timeout_ms=1_000)
    assert wire.leader_id(LOG) == NEW_LEADER


async def test_who_has_no_producer_ids_is_not_asked_for_them_again(wire: Wire) -> None:
    assert (await wire.init_producer_id()).error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    # Its word on the cluster is still heard, where no other is.
    await wire.metadata((), timeout_ms=1_000)
    for _ in range(10):
        assert (await wire.init_producer_id()).error is ErrorCode.NONE


async def test_the_only_broker_is_asked_whatever_it_said(wire: Wire) -> None:
    cluster: Any = wire._connections
    cluster.brokers = {CUT_OFF: None}
    for _ in range(2):
        assert (await wire.init_producer_id()).error is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    await wire.metadata(["log"], timeout_ms=1_000)
    assert wire.leader_id(LOG) == CUT_OFF


async def test_a_leader_is_not_forgotten_for_one_before_it(wire: Wire) -> None:
    wire.doubt(CUT_OFF)
    await wire.metadata(["log"], timeout_ms=1_000)
    wire._responsive_id, wire._doubted_id = CUT_OFF, None
    answer = await wire.metadata(["log"], timeout_ms=1_000)
    # What it says is told as it is.
    assert answer.topics["log"].partitions[0].leader_id == CUT_OFF
    assert wire.leader_id(LOG) == NEW_LEADER


async def test_a_topic_that_is_created_again_counts_its_leaders_anew(wire: Wire) -> None:
    wire.doubt(CUT_OFF)
    await wire.metadata(["log"], timeout_ms=1_000)
    cluster: Any = wire._connections
    cluster.topic_id, cluster.epochs_back = UUID(int=2), 5
    wire._responsive_id, wire._doubted_id = CUT_OFF, None
    await wire.metadata(["log"], timeout_ms=1_000)
    assert wire.leader_id(LOG) == CUT_OFF


class Slow(Cluster):
    """Of many brokers one hangs, and the others need some time to answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, brokers: int, needs_ms: int) -> None:
        super().__init__()
        self.brokers = dict.fromkeys(range(1, brokers + 1))
        self.needs_ms = needs_ms
        self.now_ms = 0
        monkeypatch.setattr(client, "monotonic", lambda: self.now_ms / 1000)

    async def send(self, node_id: int, lane: str, call: requests.Call, timeout_ms: int) -> Any:
        is_late = node_id == CUT_OFF or timeout_ms < self.needs_ms
        self.now_ms += timeout_ms if is_late else self.needs_ms
        if is_late:
            raise OutcomeUnknownError(f"no answer within {timeout_ms} ms")
        return await super().send(node_id, lane, call, timeout_ms)


@pytest.mark.parametrize(("brokers", "deadline_ms", "needs_ms"), [(30, 5_000, 200), (30, 5_000, 900), (2, 1_000, 300)])
async def test_however_many_brokers_there_are_each_has_time_to_answer(
    monkeypatch: pytest.MonkeyPatch, brokers: int, deadline_ms: int, needs_ms: int
) -> None:
    wire = Wire(KafkaSettings(bootstrap_servers="nowhere:1,nowhere:2,nowhere:3"))
    slow: Any = Slow(monkeypatch, brokers=brokers, needs_ms=needs_ms)
    wire._connections = slow
    # The one it asks first.
    wire._responsive_id = CUT_OFF
    await wire.metadata(["log"], timeout_ms=deadline_ms)
    assert wire.leader_id(LOG) == NEW_LEADER
    assert slow.now_ms <= deadline_ms
