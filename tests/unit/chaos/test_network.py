"""The network of a run, with a real socket on either side: what befalls which request, and what it leaves alone."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from oncebox.local.ports import free_ports
from proof.chaos.network import BEFALLEN, NONE_CAME, NOT_SENT, STILL_AWAITED, Network
from proof.faults.proxy import HOST, Proxy

WAIT_S = 30.0


class Broker(threading.Thread):
    """Answers each frame with its correlation id; notes the API keys that it has executed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._socket = socket.create_server((HOST, 0))
        self.port: int = self._socket.getsockname()[1]
        self.executed: list[int] = []
        self.has_executed = threading.Condition()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed: the test is over
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rwb") as stream:
            while head := stream.read(4):
                body = stream.read(int.from_bytes(head, "big"))
                with self.has_executed:
                    self.executed.append(int.from_bytes(body[:2], "big"))
                    self.has_executed.notify_all()
                stream.write(struct.pack(">i", 4) + body[4:8])
                stream.flush()

    def await_executed(self, count: int) -> None:
        with self.has_executed:
            assert self.has_executed.wait_for(lambda: len(self.executed) == count, WAIT_S)

    def close(self) -> None:
        self._socket.close()


class Client:
    def __init__(self, proxy: Proxy) -> None:
        self._socket = socket.create_connection((HOST, proxy.port), timeout=WAIT_S)

    def send(self, request: str, client_id: bytes = b"x") -> None:
        head = struct.pack(">hhih", BEFALLEN[request], 9, 1, len(client_id))
        self._socket.sendall(struct.pack(">i", len(head + client_id)) + head + client_id)

    def is_answered(self, within_s: float = WAIT_S) -> bool:
        self._socket.settimeout(within_s)
        try:
            return len(self._socket.recv(8)) == 8
        except TimeoutError:
            return False

    def close(self) -> None:
        self._socket.close()


class Meanwhile(threading.Event):
    """In place of waiting, something happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = happens

    def wait(self, timeout: float | None = None) -> bool:
        self._happens()
        return False


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    broker.start()
    yield broker
    broker.close()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture
def proxy(network: Network, broker: Broker) -> Proxy:
    proxy = network.add(kafka=True)
    network.lead(proxy, broker.port)
    return proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    client = Client(proxy)
    yield client
    client.close()


def await_no(there_is: Callable[[], object]) -> None:
    ends_at = time.monotonic() + WAIT_S
    while there_is():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def send_held(proxy: Proxy, client: Client, request: str) -> None:
    client.send(request)
    await_no(lambda: proxy._armed)  # until the proxy has the request in hand


@pytest.mark.parametrize("request_name", BEFALLEN)
def test_a_late_request_is_executed_only_when_the_fault_is_over(
    network: Network, proxy: Proxy, broker: Broker, client: Client, request_name: str
) -> None:
    def meanwhile() -> None:
        send_held(proxy, client, request_name)
        assert not client.is_answered(within_s=0.3)
        assert broker.executed == []
        client.close()
        await_no(lambda: proxy.connections)  # until the proxy knows, too

    assert network.befall("late", proxy, request_name, 1, Meanwhile(meanwhile)) == ""
    broker.await_executed(1)
    assert broker.executed == [BEFALLEN[request_name]]


def test_a_request_whose_sender_still_waits_is_not_late(
    network: Network, proxy: Proxy, broker: Broker, client: Client
) -> None:
    def meanwhile() -> None:
        send_held(proxy, client, "Produce")

    assert network.befall("late", proxy, "Produce", 1, Meanwhile(meanwhile)) == STILL_AWAITED
    assert client.is_answered()
    assert broker.executed == [BEFALLEN["Produce"]]


def test_a_request_of_whoever_waits_long_is_not_held(
    network: Network, proxy: Proxy, broker: Broker, client: Client
) -> None:
    def meanwhile() -> None:
        client.send("Produce", b"outbox-chaos")
        assert client.is_answered()

    assert network.befall("late", proxy, "Produce", 1, Meanwhile(meanwhile)) == NONE_CAME
    assert broker.executed == [BEFALLEN["Produce"]]


def test_a_late_request_that_its_broker_does_not_take_has_no_effect(
    network: Network, proxy: Proxy, broker: Broker, client: Client
) -> None:
    def meanwhile() -> None:
        send_held(proxy, client, "Produce")
        network.cut(proxy)
        network.lead(proxy, free_ports(1)[0])

    assert network.befall("late", proxy, "Produce", 1, Meanwhile(meanwhile)) == NOT_SENT
    assert broker.executed == []


def test_a_repeated_request_is_executed_twice_and_answered_once(
    network: Network, proxy: Proxy, broker: Broker, client: Client
) -> None:
    def meanwhile() -> None:
        client.send("Produce")
        assert client.is_answered()
        assert len(broker.executed) == 1

    assert network.befall("repeat", proxy, "Produce", 1, Meanwhile(meanwhile)) == ""
    broker.await_executed(2)
    assert not client.is_answered(within_s=0.3)


def test_a_lost_reply_is_of_a_request_that_was_executed_once(
    network: Network, proxy: Proxy, broker: Broker, client: Client
) -> None:
    def meanwhile() -> None:
        client.send("WriteTxnMarkers")
        broker.await_executed(1)

    assert network.befall("lost", proxy, "WriteTxnMarkers", 1, Meanwhile(meanwhile)) == ""
    assert not client.is_answered(within_s=0.3)
    assert len(broker.executed) == 1


@pytest.mark.parametrize("verb", ["late", "repeat", "lost"])
def test_where_no_such_request_comes_nothing_is_hurt_then_or_later(
    network: Network, proxy: Proxy, broker: Broker, client: Client, verb: str
) -> None:
    def meanwhile() -> None:
        client.send("Produce")
        assert client.is_answered()

    assert network.befall(verb, proxy, "TxnOffsetCommit", 1, Meanwhile(meanwhile)) == NONE_CAME
    client.send("TxnOffsetCommit")
    assert client.is_answered()
    assert broker.executed == [BEFALLEN["Produce"], BEFALLEN["TxnOffsetCommit"]]


def test_what_another_fault_has_cut_stays_cut(network: Network, proxy: Proxy) -> None:
    assert network.befall("late", proxy, "Produce", 1, Meanwhile(lambda: network.cut(proxy))) == NONE_CAME
    with pytest.raises(ConnectionRefusedError):
        Client(proxy)
    network.heal(proxy)
    client = Client(proxy)
    client.send("Produce")
    assert client.is_answered()
    client.close()


def test_connections_are_reset_and_new_ones_taken_at_once(network: Network, proxy: Proxy, client: Client) -> None:
    client.send("Produce")
    assert client.is_answered()
    network.reset(proxy)
    with pytest.raises(ConnectionResetError):
        client.is_answered()
    again = Client(proxy)
    again.send("Produce")
    assert again.is_answered()
    again.close()
