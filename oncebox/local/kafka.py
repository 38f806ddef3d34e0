"""A real Apache Kafka (KRaft) on this machine: one broker, or three with replication factor 3 and min ISR 2.
All data, logs and configuration lie in one folder; a later start continues with them. Ports are chosen at the first
start and kept over kill and restart. Each broker can be killed, paused, resumed and restarted by itself.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import secrets
import shutil
import signal
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from oncebox.local.certificates import make_certificates
from oncebox.local.errors import LocalError
from oncebox.local.jars import kafka_jars, silent
from oncebox.local.java import find_java
from oncebox.local.kafka_properties import DATA, HERE, KEYSTORE, Host, NodePorts, server_properties
from oncebox.local.ports import HOST, free_ports, is_free, is_listening
from oncebox.local.process import POLL_S, Guard, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0  # three brokers that stop together wait for each other in vain; then they are killed
PORT_ATTEMPTS = 5
USERNAME = "oncebox"
TAKEN = "Address already in use"
LOG4J = Path(__file__).with_name("log4j2.properties")
QUICK_START = "-XX:TieredStopAtLevel=1"  # a JVM option for short runs: half the time to start, slower in the long run
JVM_OPTIONS = (
    "-Xms256m",
    "-Xmx768m",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",  # its file in the system's temporary folder would outlive a kill
    "-Djava.io.tmpdir=temporary",
    f"-Dlog4j2.configurationFile={LOG4J.as_uri()}",
)


class Broker:
    """One node of a LocalKafka, broker and controller in one process."""

    def __init__(self, server: Server, *, node_id: int, ports: NodePorts, host: str) -> None:
        self._server = server
        self.node_id = node_id
        self.host = host
        self.port = ports.client
        self.internal_port = ports.broker
        self.log_path = server.log_path

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def running(self) -> bool:
        return self._server.running

    def kill(self) -> None:
        """SIGKILL: crash. Its data stays; `restart` brings it back on the same ports."""
        self._server.kill()

    def pause(self) -> None:
        """SIGSTOP: it hangs with all connections open, until `resume`."""
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM: an orderly end that hands its leaderships over; killed when the time is up."""
        self._server.ask_to_stop()
        self._server.await_stopped(timeout_s=timeout_s)

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts it again with its ports and data, and waits until it is a member of the cluster."""
        taken = [port for port in (self.port, self.internal_port) if not is_free(port)]
        if taken and not self.running:
            raise LocalError(f"broker {self.node_id} cannot start: port {taken[0]} is taken by another process")
        self._server.spawn()
        self._server.await_ready(lambda: self.node_id in self.members(), timeout_s=timeout_s)

    def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Ends it, if it still runs, and starts it."""
        if self.running:
            self.stop()
        self.start(timeout_s=timeout_s)

    def members(self) -> set[int]:
        """The live brokers of the cluster as this one sees them; empty while it does not answer."""
        if not is_listening(self.host, self.internal_port):
            return set()
        metadata = metadata_of(f"{self.host}:{self.internal_port}")
        return set() if metadata is None else set(metadata.brokers)


class LocalKafka:
    """A Kafka cluster. Use it as a context manager, or call start and stop; nothing outlives this process."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        brokers: int = 1,
        secure: bool = False,
        properties: Mapping[str, str] | None = None,
        advertised_ports: Sequence[int] | None = None,
        hosts: Sequence[Host] | None = None,
        jvm_options: Sequence[str] = (),
        progress: Callable[[str], None] = silent,
    ) -> None:
        """`properties` are added to every broker's configuration. `advertised_ports` (one per broker) are what clients
        are told to connect to, for a proxy on this machine that forwards each to the `port` of its broker. `hosts` (one
        per broker): other network namespaces to run them in. `jvm_options` are added to those of each broker's JVM.
        """
        if brokers not in {1, 3}:
            raise LocalError(f"a local Kafka has 1 or 3 brokers, not {brokers}")
        for what, given in (("advertised ports", advertised_ports), ("hosts", hosts)):
            if given is not None and len(given) != brokers:
                raise LocalError(f"{len(given)} {what} for {brokers} brokers")
        self.folder = Path(folder).absolute()
        self.host = HOST
        self.brokers: list[Broker] = []
        self._count = brokers
        self.username = USERNAME
        self.password = ""  # made with the cluster; known after start
        self._secure = secure
        self._properties = dict(properties or {})
        self._advertised_ports = advertised_ports
        self._hosts = dict(enumerate(hosts or [HERE] * brokers, start=1))
        self._jvm_options = jvm_options
        self._progress = progress
        self._guard = Guard()
        self._servers: list[Server] = []
        self._ports: dict[int, NodePorts] = {}

    @property
    def bootstrap_servers(self) -> str:
        """For clients; the advertised ports where those are set."""
        if self._advertised_ports:
            return ",".join(f"{HOST}:{port}" for port in self._advertised_ports)
        return self._servers_at("client")

    @property
    def internal_servers(self) -> str:
        """Past any proxy: the listener the brokers use among themselves."""
        return self._servers_at("broker")

    @property
    def secure_servers(self) -> str:
        """SASL_SSL with SCRAM-SHA-256; see `username`, `password` and `ca_path`."""
        if not self._secure:
            raise LocalError("this Kafka was started without a secure listener")
        return self._servers_at("secure")

    def _servers_at(self, listener: str) -> str:
        return ",".join(f"{self._hosts[n].address}:{getattr(ports, listener)}" for n, ports in self._ports.items())

    @property
    def ca_path(self) -> Path:
        return self.folder / "ca.pem"

    def check_running(self) -> None:
        """Fails with the log's tail of a broker that has ended."""
        for server in self._servers:
            server.check_running()

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Brings all brokers up and waits until each sees all others. On failure nothing is left running."""
        self._java = os.path.join(find_java(), "bin", "java")
        self._classpath = f"{kafka_jars(self._progress)}/*"
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for _attempt in range(PORT_ATTEMPTS):
                self._prepare()
                if self._start_brokers(timeout_s):
                    return self
            raise LocalError(f"{PORT_ATTEMPTS} times a port of Kafka was taken before it could be bound")
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """An orderly end of all brokers; the data stays."""
        for server in self._servers:
            server.ask_to_stop(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for server in self._servers:
            server.await_stopped(timeout_s=max(0.0, deadline - time.monotonic()))
        self._guard.close()

    def kill(self) -> None:
        """SIGKILL for all brokers at once: a crash of the whole cluster, or a quick end when the data is not needed."""
        for server in self._servers:
            server.kill()
        self._guard.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def await_in_sync(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until each running broker sees all others, and each partition has a leader and all replicas in sync."""
        deadline = time.monotonic() + timeout_s
        while lagging := self._lagging():
            if time.monotonic() > deadline:
                raise LocalError(f"not in sync after {timeout_s:.0f} s: {', '.join(lagging[:10])}")
            time.sleep(POLL_S)

    def _lagging(self) -> list[str]:
        alive = [broker for broker in self.brokers if broker.running]
        if not alive:
            return ["no broker answers"]
        # One that stood still and was put out of the cluster meanwhile joins it again, a moment after it goes on.
        ids = {broker.node_id for broker in alive}
        if apart := [f"broker {broker.node_id}" for broker in alive if not ids <= broker.members()]:
            return apart
        metadata = metadata_of(",".join(f"{broker.host}:{broker.internal_port}" for broker in alive))
        if metadata is None:
            return ["no broker answers"]
        return [
            f"{topic.topic}-{partition.id}"
            for topic in metadata.topics.values()
            for partition in topic.partitions.values()
            if partition.leader < 0 or len(partition.isrs) < len(partition.replicas)
        ]

    def _prepare(self) -> None:
        """Chooses ports, writes the configuration, and formats the storage of a new cluster."""
        state_path = self.folder / "cluster.json"
        state = json.loads(state_path.read_text()) if state_path.exists() else None
        if state is not None and (state["brokers"], state["secure"]) != (self._count, self._secure):
            held = f"{state['brokers']} broker(s) {'with' if state['secure'] else 'without'} a secure listener"
            raise LocalError(f"{self.folder} holds a cluster of {held}: take another folder or begin afresh")
        if not self._ports:
            self._ports = self._kept_ports(state) or _choose_ports(self._count)
        self._make_servers()
        cluster_id = state["cluster_id"] if state is not None else _new_cluster_id()
        self.password = state["password"] if state is not None else secrets.token_urlsafe(18)
        if state is None:
            self._format(cluster_id)
        ports = {str(node): dataclasses.asdict(at) for node, at in self._ports.items()}
        content = {"cluster_id": cluster_id, "brokers": self._count, "ports": ports}
        content |= {"secure": self._secure, "password": self.password}
        # Written after the format: its presence says that the storage is complete.
        _write_atomically(state_path, json.dumps(content, indent=1))

    def _kept_ports(self, state: Any) -> dict[int, NodePorts] | None:
        if state is None:
            return None
        kept = {int(node): NodePorts(**at) for node, at in state["ports"].items()}
        free = all(is_free(port) for at in kept.values() for port in dataclasses.astuple(at))
        return kept if free else None

    def _make_servers(self) -> None:
        self._servers, self.brokers = [], []
        for node_id, ports in self._ports.items():
            node_folder = self.folder / f"broker-{node_id}"
            (node_folder / "temporary").mkdir(parents=True, exist_ok=True)
            host = self._hosts[node_id]
            (node_folder / "server.properties").write_text(
                server_properties(
                    node_id=node_id,
                    ports=self._ports,
                    hosts=self._hosts,
                    advertised_port=self._advertised_ports[node_id - 1] if self._advertised_ports else None,
                    secure=self._secure,
                    extra=self._properties,
                )
            )
            server = Server(
                name=f"Kafka broker {node_id}",
                command=[*host.enter, *self._command(*self._jvm_options), "kafka.Kafka", "server.properties"],
                log_path=node_folder / "broker.log",
                guard=self._guard,
                folder=node_folder,
            )
            self._servers.append(server)
            self.brokers.append(Broker(server, node_id=node_id, ports=ports, host=host.address))

    def _command(self, *options: str) -> list[str]:
        return [self._java, *JVM_OPTIONS, *options, "-cp", self._classpath]

    def _format(self, cluster_id: str) -> None:
        self._progress("Formatting the storage of Kafka")
        if self._secure:
            make_certificates(ca_path=self.ca_path, keystore_path=self.folder / KEYSTORE)
        formats = [self._format_server(server.log_path.parent, cluster_id) for server in self._servers]
        for process in formats:
            process.spawn()
        for process in formats:
            process.await_stopped(timeout_s=START_TIMEOUT_S)
            if process.exit_code != 0:
                process.fail(f"{process.name} failed")

    def _format_server(self, node_folder: Path, cluster_id: str) -> Server:
        shutil.rmtree(node_folder / DATA, ignore_errors=True)  # half a format of a run that was cut off
        command = [*self._command(QUICK_START), "kafka.tools.StorageTool", "format"]
        command += ["-t", cluster_id, "-c", "server.properties"]
        if self._secure:
            shutil.copy(self.folder / KEYSTORE, node_folder / KEYSTORE)
            command += ["--add-scram", f'SCRAM-SHA-256=[name="{self.username}",password="{self.password}"]']
        return Server(
            name=f"formatting {node_folder / DATA}",
            command=command,
            log_path=node_folder / "format.log",
            guard=self._guard,
            folder=node_folder,
        )

    def _start_brokers(self, timeout_s: float) -> bool:
        """False when somebody has taken one of the ports since they were chosen."""
        self._progress(f"Starting Kafka ({self._count} broker{'s' if self._count > 1 else ''})")
        for server in self._servers:
            server.spawn()
        try:
            self._await_members(timeout_s)
        except LocalError:
            taken = [server.name for server in self._servers if TAKEN in server.output()]
            if not taken:
                raise
            self._progress(f"A port of {', '.join(taken)} was taken meanwhile; trying others")
            self.kill()
            self._ports = {}
        return bool(self._ports)

    def _await_members(self, timeout_s: float) -> None:
        everyone = set(self._ports)
        deadline = time.monotonic() + timeout_s
        for broker, server in zip(self.brokers, self._servers, strict=True):
            while True:
                self.check_running()  # of any broker: the others would wait for it in vain
                if everyone <= broker.members():
                    break
                if time.monotonic() > deadline:
                    server.fail(f"{server.name} did not see all others after {timeout_s:.0f} s")
                time.sleep(POLL_S)


def _choose_ports(count: int) -> dict[int, NodePorts]:
    free = iter(free_ports(4 * count))
    return {
        node_id: NodePorts(client=next(free), broker=next(free), controller=next(free), secure=next(free))
        for node_id in range(1, count + 1)
    }


def _new_cluster_id() -> str:
    """As Kafka makes them; not one that the format's command line would take for an option."""
    while (cluster_id := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return cluster_id


def metadata_of(bootstrap_servers: str) -> Any:
    """The cluster's metadata from the first of the servers that answers, or None."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    config: dict[str, Any] = {"bootstrap.servers": bootstrap_servers, "log_level": 0, "socket.timeout.ms": 5000}
    admin = AdminClient(config, error_cb=lambda _error: None)
    try:
        return admin.list_topics(timeout=5)
    except KafkaException:
        return None


def create_topics(bootstrap_servers: str, names: Iterable[str], partitions: int) -> set[str]:
    """Which of them did not exist before."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0}, error_cb=lambda _error: None)
    created = set()
    wanted = [NewTopic(name, partitions) for name in dict.fromkeys(names)]
    for name, done in admin.create_topics(wanted, operation_timeout=30, request_timeout=30).items():
        try:
            done.result()
            created.add(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise LocalError(f"the topic {name!r} cannot be created: {error.args[0].str()}") from None
    return created


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_text(text)
    partial.rename(path)
