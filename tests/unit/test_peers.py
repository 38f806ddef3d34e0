"""Following another instance: whatever way it ends, it is noticed once and told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import grpc
import pytest

from coordinator import peers as module
from coordinator.core.apply import PartitionState, apply
from coordinator.core.records import IdState, Slot
from coordinator.log import codec
from coordinator.peers import Peers, held_producer_ids
from oncebox.session import open_plain_channel
from oncebox.v1 import peer_pb2, peer_pb2_grpc
from tests.unit.core.states import NOW_MS, id_state, outcome

LEADING = peer_pb2.Leading(
    instance="other", partitions=[peer_pb2.LedPartition(log_partition=3, coordinator_epoch=7, serving=True)]
)
End = Callable[[Any], Awaitable[None]]


class Other(peer_pb2_grpc.PeersServicer):
    """Says what it leads, and ends the stream as the test has it when told to."""

    def __init__(self, end: End) -> None:
        self._end = end
        self.ends = asyncio.Event()
        self.instance = "other"

    async def Follow(self, request: peer_pb2.FollowRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        del request
        await context.write(peer_pb2.Leading(instance=self.instance, partitions=LEADING.partitions))
        await self.ends.wait()
        await self._end(context)

    async def ListOpen(self, request: peer_pb2.ListOpenRequest, context: Any) -> peer_pb2.ListOpenResponse:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def following(end: End) -> AsyncIterator[tuple[Other, "asyncio.Queue[peer_pb2.Leading]"]]:
    server = grpc.aio.server()
    other = Other(end)
    peer_pb2_grpc.add_PeersServicer_to_server(other, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gone: asyncio.Queue[peer_pb2.Leading] = asyncio.Queue()
    open_channel = partial(open_plain_channel, connect_timeout_ms=20_000)
    peers = Peers("me", "me:1", open_channel=open_channel, gone=gone.put_nowait)
    try:
        peers.follow({"me": "me:1", "other": f"127.0.0.1:{port}"})
        async with asyncio.timeout(60):
            while "other" not in peers.leading:  # noqa: ASYNC110 - heard over a real connection
                await asyncio.sleep(0.01)
        yield other, gone
    finally:
        await peers.close()
        await server.stop(None)


async def aborts(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "going")


async def cancels(context: Any) -> None:
    await context.abort(grpc.StatusCode.CANCELLED, "going")


async def returns(_context: Any) -> None:
    """The stream ends in good order."""


async def hangs(_context: Any) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("end", [aborts, cancels, returns, hangs])
async def test_an_instance_that_is_gone_is_told_whatever_way_it_went(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    monkeypatch.setattr(module, "RECONNECT_S", 0.5)
    async with following(end) as (other, gone):
        # Whoever answers there from now on is somebody else.
        other.instance = "third"
        other.ends.set()
        async with asyncio.timeout(60):
            heard = await gone.get()
        assert [led.log_partition for led in heard.partitions] == [3]


async def test_a_lost_connection_is_not_a_lost_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "RECONNECT_S", 30.0)
    async with following(aborts) as (other, gone):
        other.ends.set()
        await asyncio.sleep(0.3)
        assert gone.empty()


async def test_an_instance_that_goes_before_a_new_stream_has_said_anything_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection broke, it answered once more, and was gone before it could be followed again."""
    words = iter([LEADING, None])
    answers = iter([True, False])
    gone: asyncio.Queue[peer_pb2.Leading] = asyncio.Queue()
    peers = Peers("me", "me:1", open_channel=open_plain_channel, gone=gone.put_nowait)

    async def listen(_address: str, instance: str) -> peer_pb2.Leading | None:
        heard = next(words, None)
        if heard is not None:
            peers.leading[instance] = heard
        return heard

    async def answer(_address: str, _instance: str) -> bool:
        return next(answers)

    monkeypatch.setattr(peers, "_listen", listen)
    monkeypatch.setattr(peers, "_answers", answer)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    peers.follow({"me": "me:1", "other": "other:1"})
    async with asyncio.timeout(60):
        assert await gone.get() == LEADING
    assert peers.leading == {}
    await asyncio.sleep(0.1)
    assert gone.empty()  # once
    await peers.close()


async def test_producer_ids_are_found_with_active_and_packed_ids_and_with_those_that_move_meanwhile() -> None:
    def state(name: str, now: int, former: int) -> IdState:
        slot = Slot(producer_id=now, epoch=0, since_ms=NOW_MS)
        return id_state(transactional_id=name, slots=(slot,), outcomes=(outcome(1, producer_id=former),))

    ids = PartitionState(unpack=codec.decode_id)
    for number, name in enumerate(("active", "leaving", "packed", "waking")):
        apply(ids, state(name, 10 * number, 10 * number + 1))
    for name in ("packed", "waking"):
        ids.packed.put(name, codec.encode_id(ids.active.pop(name)))
    asking = asyncio.ensure_future(held_producer_ids(ids, frozenset(range(100)) - {1}))
    leaving = ids.active["leaving"]
    await asyncio.sleep(0)
    woken = codec.decode_id("waking", ids.packed.get("waking") or b"")
    apply(ids, woken)
    del ids.active["leaving"]
    ids.packed.put("leaving", codec.encode_id(leaving))
    assert await asking == {0, 10, 11, 20, 21, 30, 31}
    assert await held_producer_ids(ids, frozenset()) == set()


class Words:
    """A channel and the one stream over it, whose next word comes when the test says."""

    def __init__(self) -> None:
        self.next: asyncio.Future[peer_pb2.Leading] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def unary_stream(self, *_: Any, **__: Any) -> Callable[..., "Words"]:
        return lambda *_, **__: self

    unary_unary = unary_stream

    async def read(self) -> peer_pb2.Leading:
        self.next = asyncio.get_running_loop().create_future()
        return await self.next


@pytest.mark.parametrize("steps", range(5))
async def test_closing_is_not_missed_for_a_word_that_comes_at_the_same_moment(steps: int) -> None:
    words: Any = Words()
    peers = Peers("me", "me:1", open_channel=lambda _: words, gone=lambda _: None)
    peers.follow({"me": "me:1", "other": "other:1"})
    while words.next is None:  # noqa: ASYNC110 - the other task's step
        await asyncio.sleep(0)
    words.next.set_result(LEADING)
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await peers.close()
