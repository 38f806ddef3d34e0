"""One connection with a peer that does what no real broker does: answers in pieces, out of step, unreadable, or none.

What a real broker does is in the integration tests.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from oncebox.wire import Appended, ErrorCode, OutcomeUnknownError, TopicPartition, requests
from oncebox.wire.connection import MAX_ANSWER_BYTES, Connection, dial
from tests.support.listening import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    NewLoop = Callable[[], asyncio.AbstractEventLoop]

PARTITION = TopicPartition("orders", 3)
PRODUCE = 0
both_loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "big", signed=True)


def framed(correlation_id: int, body: bytes) -> bytes:
    return number(len(body) + 4, 4) + number(correlation_id, 4) + body


def produce_answer(correlation_id: int, offset: int) -> bytes:
    row = number(3, 4) + number(0, 2) + number(offset, 8) + number(-1, 8) + number(0, 8) + number(0, 4) + number(-1, 2)
    return framed(correlation_id, number(1, 4) + number(6, 2) + b"orders" + number(1, 4) + row + number(0, 4))


def appended(offset: int) -> dict[TopicPartition, Appended]:
    one = Appended(
        error=ErrorCode.NONE, base_offset=offset, log_append_time_ms=-1, log_start_offset=0, error_message=None
    )
    return {PARTITION: one}


def produce() -> requests.Call:
    return requests.produce_call({PARTITION: b"batch"}, transactional_id=None, acks=-1, timeout_ms=1)


@asynccontextmanager
async def connected(*, reply: bytes = b"", ends: bool = False, max_idle_ms: int = 60_000) -> AsyncIterator[Connection]:
    """To a peer that tells its versions, as every connection begins, and says `reply` to the first request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.write(framed(1, number(0, 2) + number(1, 4) + number(PRODUCE, 2) + number(0, 2) + number(8, 2)))
        if await reader.read(1):
            writer.write(reply)
            if ends:
                writer.write_eof()
            await reader.read()

    async with listening(serve) as port:
        options = {"client_id": "me", "security_protocol": "PLAINTEXT"}
        connection = await dial("127.0.0.1", port, name="peer", max_idle_ms=max_idle_ms, options=options)
        try:
            yield connection
        finally:
            await connection.drop("the test is over")


def run(new_loop: NewLoop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


@given(cuts=st.lists(st.integers(1, 60), max_size=30), given_up=st.sets(st.integers(0, 4)))
@settings(max_examples=50, deadline=None)
def test_answers_are_read_whatever_pieces_they_come_in(cuts: list[int], given_up: set[int]) -> None:
    async def main() -> None:
        async with connected() as connection:
            answers = [connection.send(produce(), 60_000) for _ in range(5)]
            for index in given_up:
                answers[index].cancel()
            rest = b"".join(produce_answer(index + 1, 100 + index) for index in range(5))
            for cut in cuts:
                connection.data_received(rest[:cut])
                rest = rest[cut:]
            connection.data_received(rest)
            for index, answer in enumerate(answers):
                assert answer.cancelled() if index in given_up else answer.result() == appended(100 + index)
            assert connection.is_open()

    run(asyncio.new_event_loop, main())


@both_loops
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (produce_answer(2, 0), "answer 2 is not the one awaited"),
        (number(3, 4) + bytes(8), "an answer of 3 bytes"),
        (number(-1, 4) + bytes(8), "an answer of -1 bytes"),
        (number(MAX_ANSWER_BYTES + 1, 4) + bytes(8), f"an answer of {MAX_ANSWER_BYTES + 1} bytes"),
        (framed(1, number(1, 4) + number(6, 2) + b"ord"), "error"),  # ends too soon
        (framed(1, number(1, 4) + number(1, 2) + b"\xff" + bytes(40)), "UnicodeDecodeError"),
    ],
)
def test_what_is_no_answer_closes_the_connection(new_loop: NewLoop, reply: bytes, said: str) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        async with connected(reply=reply) as connection:
            answers = [connection.send(produce(), 60_000) for _ in range(2)]
            for answer in answers:
                with pytest.raises(OutcomeUnknownError, match=f"peer: .*{said}"):
                    await answer
            await connection.closed
            assert not connection.is_open()

    run(new_loop, main())


@both_loops
def test_a_broker_that_goes_leaves_no_request_waiting(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected(reply=produce_answer(1, 5), ends=True) as connection:
            answers = [connection.send(produce(), 60_000) for _ in range(3)]
            assert await answers[0] == appended(5)
            for answer in answers[1:]:
                with pytest.raises(OutcomeUnknownError, match="peer: "):
                    await answer
            assert not connection.is_open()

    run(new_loop, main())


@both_loops
def test_an_answer_that_nobody_awaits_closes_the_connection(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected(reply=produce_answer(1, 0) * 2) as connection:
            assert await connection.send(produce(), 60_000) == appended(0)
            await connection.closed

    run(new_loop, main())


@both_loops
def test_the_first_deadline_that_passes_closes_the_connection(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected() as connection:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            long, short, longer = (connection.send(produce(), timeout_ms) for timeout_ms in (60_000, 100, 70_000))
            with pytest.raises(OutcomeUnknownError, match="peer: no answer within 100 ms"):
                await short
            assert 0.09 < loop.time() - begun < 30
            for other in (long, longer):
                with pytest.raises(OutcomeUnknownError, match="peer: closed, since an earlier answer is overdue"):
                    await other
            assert not connection.is_open()

    run(new_loop, main())


@both_loops
def test_the_deadline_of_a_request_that_waited_for_its_connection_counts_from_its_call(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected() as connection:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            answer = connection.send(produce(), 60_000, begun + 0.1)
            with pytest.raises(OutcomeUnknownError, match="no answer within 60000 ms"):
                await answer
            assert loop.time() - begun < 30

    run(new_loop, main())


@both_loops
def test_a_caller_that_has_given_up_does_not_cost_the_connection(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected() as connection:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            given_up, awaited = connection.send(produce(), 50), connection.send(produce(), 200)
            given_up.cancel()
            with pytest.raises(OutcomeUnknownError):
                await awaited
            assert loop.time() - begun > 0.19

    run(new_loop, main())


@both_loops
def test_a_silent_connection_closes_though_all_callers_give_up_before_their_deadline(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected() as connection:
            async with asyncio.timeout(30):
                while connection.is_open():
                    given_up = connection.send(produce(), 100)
                    await asyncio.wait([given_up], timeout=0.02)
                    given_up.cancel()
            await connection.closed

    run(new_loop, main())


@both_loops
def test_an_idle_connection_closes_but_not_one_that_waits_for_an_answer(new_loop: NewLoop) -> None:
    async def main() -> None:
        async with connected(max_idle_ms=500) as connection:
            answer = connection.send(produce(), 1_500)
            with pytest.raises(OutcomeUnknownError, match="no answer within 1500 ms"):
                await answer
        async with connected(reply=produce_answer(1, 7), max_idle_ms=1_000) as connection:
            assert await connection.send(produce(), 60_000) == appended(7)
            assert connection.is_open()
            await connection.closed

    run(new_loop, main())


@both_loops
def test_a_closed_connection_answers_nothing(new_loop: NewLoop) -> None:
    """In uvloop's words at once; asyncio's own loop takes what is written and forgets it."""

    async def main() -> None:
        async with connected() as connection:
            await connection.drop("gone")
            with pytest.raises(OutcomeUnknownError, match="peer: "):
                await connection.send(produce(), 100)

    run(new_loop, main())
