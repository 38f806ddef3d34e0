"""The proxy between real sockets: a client, the proxy, and a server that answers frames as a broker does."""

import asyncio
import struct
from collections.abc import Callable
from typing import Self

import pytest

from proof.faults.proxy import Proxy
from proof.faults.requests import frame, read_frame
from tests.support.listening import listening

PRODUCE, END_TXN = 0, 26


class Server:
    """Answers each frame in order with its correlation id and its text in capitals."""

    def __init__(self) -> None:
        self.executed: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        while body := await read_frame(reader):
            self.executed.append(body[8:])
            writer.write(frame(body[4:8] + body[8:].upper()))
        writer.close()

    async def stop(self) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()


class Client:
    def __init__(self, port: int) -> None:
        self.port = port
        self.correlation_id = 0

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()

    def send(self, text: bytes, api_key: int = PRODUCE) -> None:
        self.correlation_id += 1
        self.writer.write(frame(struct.pack(">hhi", api_key, 9, self.correlation_id) + text))

    async def receive(self) -> tuple[int, bytes] | None:
        """Correlation id and text of the next reply; None at the end of the stream."""
        reply = await asyncio.wait_for(read_frame(self.reader), 30)
        return (int.from_bytes(reply[:4], "big"), reply[4:]) if reply else None

    async def ask(self, text: bytes, api_key: int = PRODUCE) -> tuple[int, bytes] | None:
        self.send(text, api_key)
        return await self.receive()

    async def silent(self, for_s: float = 0.2) -> bool:
        """Nothing arrives: no reply, no end."""
        try:
            await asyncio.wait_for(self.reader.read(1), for_s)
        except TimeoutError:
            return True
        return False


@pytest.fixture
async def server():
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def proxy(server):
    before = asyncio.all_tasks()
    async with Proxy(server.address, kafka=True) as proxy:
        yield proxy
    assert proxy.connections == 0
    left = {task for task in asyncio.all_tasks() - before if "_Connection" in repr(task)}
    assert not left


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - watches the far side, which raises no event
            await asyncio.sleep(0.005)


async def test_it_forwards_in_order(proxy):
    async with Client(proxy.port) as client:
        for number in range(50):
            client.send(b"message-%d" % number)
        assert [await client.receive() for _ in range(50)] == [
            (number + 1, b"MESSAGE-%d" % number) for number in range(50)
        ]


async def test_large_frames_pass_whole(proxy):
    text = b"x" * 5_000_000
    async with Client(proxy.port) as client:
        assert await client.ask(text) == (1, text.upper())


async def test_bytes_of_any_protocol_pass_and_so_does_the_end(server):
    async def until_end(reader, writer):
        writer.write((await reader.read())[::-1])  # after the client's end: half-closed

    async with listening(until_end) as echo, Proxy(("127.0.0.1", echo)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"abc" * 100_000)
        writer.write_eof()
        assert await reader.read() == b"cba" * 100_000
        writer.close()
        await until(lambda: not proxy.connections)


async def test_the_end_of_the_server_reaches_the_client(proxy, server):
    async with Client(proxy.port) as client:
        await client.ask(b"a")
        server.writers[0].close()
        assert await client.receive() is None


async def test_no_server_closes_the_client(proxy, server):
    server.server.close()
    async with Client(proxy.port) as client:
        with pytest.raises(ConnectionResetError):
            await client.receive()


async def test_a_new_target_serves_new_connections(proxy):
    other = Server()
    await other.start()
    async with Client(proxy.port) as old:
        await old.ask(b"a")
        proxy.target = other.address
        async with Client(proxy.port) as new:
            await new.ask(b"b")
            await old.ask(b"c")
    assert other.executed == [b"b"]
    await other.stop()


async def test_cut_resets_connections_and_refuses_new_ones(proxy):
    async with Client(proxy.port) as client:
        await client.ask(b"a")
        await proxy.cut()
        with pytest.raises(ConnectionResetError):
            await client.receive()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", proxy.port)
    assert proxy.connections == 0


async def test_heal_serves_again_on_the_same_port(proxy):
    for _ in range(3):
        await proxy.cut()
        await proxy.cut()
        await proxy.heal()
        await proxy.heal()
        async with Client(proxy.port) as client:
            assert await client.ask(b"a") == (1, b"A")


async def test_nobody_gets_the_port_while_it_is_cut(proxy):
    await proxy.cut()
    with pytest.raises(OSError, match="in use"):
        await asyncio.start_server(lambda *_: None, "127.0.0.1", proxy.port)


@pytest.mark.parametrize("direction", ["to_server_s", "to_client_s"])
async def test_delay_is_latency_not_throughput(proxy, direction):
    clock = asyncio.get_running_loop().time
    async with Client(proxy.port) as client:
        await client.ask(b"a")
        proxy.delay(**{direction: 0.3})
        start_s = clock()
        for _ in range(20):
            client.send(b"b")
        for _ in range(20):
            await client.receive()
        assert 0.3 <= clock() - start_s < 20 * 0.3
        proxy.delay(**{direction: 3600})
        await proxy.heal()
        assert await client.ask(b"c") == (22, b"C")


async def test_what_was_delayed_arrives_though_its_client_has_gone(proxy, server):
    proxy.delay(to_server_s=0.2)
    async with Client(proxy.port) as client:
        client.send(b"late")
    await until(lambda: server.executed == [b"late"])


async def test_dropped_replies_were_executed(proxy, server):
    async with Client(proxy.port) as client:
        await client.ask(b"a")
        proxy.drop(to_client=True)
        client.send(b"b")
        await until(lambda: server.executed == [b"a", b"b"])
        assert await client.silent()
        await proxy.heal()
        client.send(b"c")  # a stream with a gap cannot be mended
        await until(lambda: server.executed == [b"a", b"b", b"c"])
        assert await client.silent()
        async with Client(proxy.port) as another:
            assert await another.ask(b"d") == (1, b"D")


async def test_dropped_requests_never_arrive(proxy, server):
    async with Client(proxy.port) as client:
        await client.ask(b"a")
        proxy.drop(to_server=True)
        client.send(b"b")
        assert await client.silent()
    assert server.executed == [b"a"]


async def test_in_a_black_hole_the_servers_end_is_not_heard(proxy, server):
    async with Client(proxy.port) as client:
        await client.ask(b"a")
        proxy.drop(to_client=True)
        server.writers[0].close()
        assert await client.silent()


async def test_a_held_request_and_all_behind_it_wait(proxy, server):
    held = proxy.hold(END_TXN)
    async with Client(proxy.port) as client, Client(proxy.port) as other:
        assert await client.ask(b"a") == (1, b"A")
        client.send(b"end", END_TXN)
        client.send(b"b")
        assert await held.caught() == struct.pack(">hhi", END_TXN, 9, 2) + b"end"
        assert await other.ask(b"c") == (1, b"C")
        assert await client.silent()
        assert server.executed == [b"a", b"c"]
        assert (await held.release())[4:] == b"END"
        assert await client.receive() == (2, b"END")
        assert await client.receive() == (3, b"B")
    assert server.executed == [b"a", b"c", b"end", b"b"]


async def test_a_fault_befalls_one_request(proxy):
    held = proxy.hold(END_TXN)
    async with Client(proxy.port) as client, Client(proxy.port) as other:
        client.send(b"end", END_TXN)
        await held.caught()
        assert await other.ask(b"end", END_TXN) == (1, b"END")
        await held.release()


async def test_a_request_can_be_chosen_by_its_content(proxy):
    held = proxy.hold(PRODUCE, where=lambda request: b"mine" in request)
    async with Client(proxy.port) as client:
        assert await client.ask(b"yours") == (1, b"YOURS")
        client.send(b"mine")
        assert (await held.caught()).endswith(b"mine")


async def test_a_held_request_is_sent_late_when_its_client_has_gone(proxy, server):
    held = proxy.hold(PRODUCE)
    async with Client(proxy.port) as client:
        client.send(b"late")
        client.send(b"behind it")
        await held.caught()
    await until(lambda: not proxy.connections)
    async with Client(proxy.port) as client:
        assert await client.ask(b"retry") == (1, b"RETRY")
        assert await held.release() == struct.pack(">i", 1) + b"LATE"
        assert await client.ask(b"next") == (2, b"NEXT")
    assert server.executed == [b"retry", b"late", b"next"]
    assert server.connections == 3


async def test_a_held_request_is_sent_late_when_it_was_cut(proxy, server):
    held = proxy.hold(PRODUCE)
    async with Client(proxy.port) as client:
        client.send(b"late")
        await held.caught()
        await proxy.cut()
        assert (await held.release())[4:] == b"LATE"
    assert server.executed == [b"late"]


async def test_a_held_request_is_sent_late_when_the_server_came_back(proxy, server):
    held = proxy.hold(PRODUCE)
    async with Client(proxy.port) as client:
        client.send(b"late")
        await held.caught()
        await until(lambda: server.writers)
        server.writers[0].close()
        assert await client.receive() is None
        assert (await held.release())[4:] == b"LATE"


async def test_a_late_request_without_a_server_fails(proxy, server):
    held = proxy.hold(PRODUCE)
    async with Client(proxy.port) as client:
        client.send(b"late")
        await held.caught()
    await until(lambda: not proxy.connections)
    server.server.close()
    with pytest.raises(ConnectionRefusedError):
        await held.release()


async def test_a_copy_passes_and_is_sent_again_later(proxy, server):
    copied = proxy.copy(END_TXN)
    async with Client(proxy.port) as client:
        assert await client.ask(b"end", END_TXN) == (1, b"END")
        assert await client.ask(b"begin") == (2, b"BEGIN")
        assert (await copied.release())[4:] == b"END"
        assert (await copied.release())[4:] == b"END"
        assert await client.ask(b"c") == (3, b"C")
    assert server.executed == [b"end", b"begin", b"end", b"end", b"c"]


async def test_a_doubled_request_is_executed_twice_and_answered_once(proxy, server):
    doubled = proxy.double(PRODUCE, where=lambda request: request.endswith(b"b"))
    async with Client(proxy.port) as client:
        client.send(b"a")
        client.send(b"b")
        client.send(b"c")
        assert [await client.receive() for _ in range(3)] == [(1, b"A"), (2, b"B"), (3, b"C")]
        assert await doubled.reply() == struct.pack(">i", 2) + b"B"
    assert server.executed == [b"a", b"b", b"b", b"c"]


async def test_a_swallowed_reply_silences_its_connection(proxy, server):
    swallowed = proxy.swallow_reply(END_TXN)
    async with Client(proxy.port) as client:
        client.send(b"end", END_TXN)
        client.send(b"after")
        assert (await swallowed.reply())[4:] == b"END"
        assert await client.silent()
        await until(lambda: server.executed == [b"end", b"after"])
    async with Client(proxy.port) as client:
        assert await client.ask(b"end", END_TXN) == (1, b"END")


async def test_a_swallowed_reply_is_known_though_its_client_has_gone(proxy, server):
    swallowed = proxy.swallow_reply(END_TXN)
    proxy.delay(to_server_s=0.1, to_client_s=0.1)
    async with Client(proxy.port) as client:
        client.send(b"end", END_TXN)
    assert (await swallowed.reply())[4:] == b"END"
    await until(lambda: not proxy.connections)


async def test_a_swallowed_reply_can_close_its_connection(proxy, server):
    proxy.swallow_reply(END_TXN, close=True)
    async with Client(proxy.port) as client:
        with pytest.raises(ConnectionResetError):
            await client.ask(b"end", END_TXN)
    assert server.executed == [b"end"]


async def test_a_request_that_does_not_come_is_told(proxy):
    with pytest.raises(TimeoutError, match=r"no request with API key 0 came within 0.05 s"):
        await proxy.hold(PRODUCE).caught(0.05)


async def test_a_connection_that_ends_before_the_reply_leaves_it_unknown(server):
    async def never_answer(reader, writer):
        await read_frame(reader)

    async with listening(never_answer) as mute, Proxy(("127.0.0.1", mute), kafka=True) as proxy:
        doubled = proxy.double(PRODUCE)
        async with Client(proxy.port) as client:
            assert await client.ask(b"a") is None
        with pytest.raises(ConnectionError, match="ended before the reply"):
            await doubled.reply()


async def test_heal_disarms_but_keeps_what_is_in_hand(proxy, server):
    held = proxy.hold(PRODUCE)
    proxy.hold(END_TXN)
    async with Client(proxy.port) as client, Client(proxy.port) as other:
        client.send(b"a")
        await held.caught()
        await proxy.heal()
        assert await other.ask(b"end", END_TXN) == (1, b"END")
        await held.release()
        assert await client.receive() == (1, b"A")


async def test_what_is_not_kafka_is_refused(proxy, caplog):
    async with Client(proxy.port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await client.receive() is None
    assert "not a Kafka frame" in caplog.text


async def test_request_faults_need_a_kafka_proxy(server):
    async with Proxy(server.address) as proxy:
        with pytest.raises(ValueError, match="kafka=True"):
            proxy.hold(PRODUCE)


async def test_closing_leaves_nothing(server):
    async with Proxy(server.address, kafka=True) as proxy:
        held = proxy.hold(PRODUCE)
        proxy.delay(to_client_s=100)
        async with Client(proxy.port) as client:
            client.send(b"a")
            await held.caught()
            async with Client(proxy.port) as other:
                other.send(b"b")
                await until(lambda: server.executed)
                assert proxy.connections == 2
    assert proxy.connections == 0
    await until(lambda: len(asyncio.all_tasks()) == 1)
