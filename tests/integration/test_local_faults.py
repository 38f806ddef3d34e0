"""When a part cannot start, one clear error says why, with the log's tail, and nothing is left running."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from oncebox.local import LocalError, LocalKafka, LocalPostgres, kafka, postgres
from oncebox.local.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """Somebody else's port."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        yield stranger.getsockname()[1]


def first_giving(port: int) -> Callable[[int], list[int]]:
    """As if `port` had been free when it was chosen and taken before it was bound."""
    pending = [port]

    def choose_ports(count: int) -> list[int]:
        return [pending.pop(), *free_ports(count - 1)] if pending else free_ports(count)

    return choose_ports


def test_postgres_takes_another_port_when_its_own_is_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    with listening() as port:
        monkeypatch.setattr(postgres, "free_ports", first_giving(port))
        with LocalPostgres(tmp_path, progress=lines.append) as server:
            assert server.port != port
    assert f"Port {port} was taken meanwhile; trying another" in lines


@pytest.mark.kafka
def test_kafka_takes_other_ports_when_one_is_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    with listening() as port:
        monkeypatch.setattr(kafka, "free_ports", first_giving(port))
        with LocalKafka(tmp_path, progress=lines.append, jvm_options=[kafka.QUICK_START]) as server:
            assert str(port) not in server.bootstrap_servers
            broker = server.brokers[0]
            broker.kill()
            with (
                socket.create_server(("127.0.0.1", broker.port)),
                pytest.raises(LocalError, match=f"broker 1 cannot start: port {broker.port} is taken"),
            ):
                broker.restart()
            broker.restart()
            assert broker.members() == {1}
    assert "A port of Kafka broker 1 was taken meanwhile; trying others" in lines


@pytest.mark.kafka
def test_a_broker_that_does_not_come_up_is_told_with_its_log(tmp_path: Path):
    server = LocalKafka(tmp_path, properties={"num.io.threads": "none"})
    with pytest.raises(LocalError, match=r"(?s)failed; the end of .*format\.log.*num\.io\.threads") as caught:
        server.start()
    assert len(str(caught.value).splitlines()) <= 22
    assert list(tmp_path.glob("cluster.json")) == []


@pytest.mark.kafka
def test_when_one_of_three_does_not_come_up_the_others_are_stopped(tmp_path: Path):
    def spoil(line: str) -> None:
        if line.startswith("Starting Kafka"):
            (tmp_path / "broker-2" / "data" / "meta.properties").write_text("version=1\nnode.id=9\n")

    server = LocalKafka(tmp_path, brokers=3, progress=spoil, jvm_options=[kafka.QUICK_START])
    with pytest.raises(
        LocalError, match=r"(?s)broker 2 has ended \(exit code 1\); the end of .*log:.*meta\.properties"
    ):
        server.start()
    assert not any(broker.running for broker in server.brokers)


def test_postgres_that_does_not_come_up_is_told_with_its_log(tmp_path: Path):
    server = LocalPostgres(tmp_path, settings={"wal_level": "nonsense"})
    with pytest.raises(LocalError, match=r"(?s)PostgreSQL has ended .*invalid value for parameter \"wal_level\""):
        server.start()
    assert not server.running
    with LocalPostgres(tmp_path) as mended:
        assert mended.running


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 4 MB; needs the right to mount one."""
    folder = tmp_path / "full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_postgres_on_a_full_disk(full_disk: Path):
    with pytest.raises(LocalError, match=r"(?s)initdb failed; .*No space left on device"):
        LocalPostgres(full_disk).start()


@pytest.mark.kafka
def test_kafka_on_a_full_disk(full_disk: Path):
    with contextlib.suppress(OSError), (full_disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    with pytest.raises(OSError, match="No space left on device"):
        LocalKafka(full_disk / "kafka").start()
