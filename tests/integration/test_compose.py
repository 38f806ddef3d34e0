"""The containers of compose.yaml without Docker: what each would run, with the environment it would have; only hosts,
ports and folders are others. Brokers are set up by the image's own class. Our services run from a folder made as their
image is: the wheel, and what deploy/<service>.lock names, nothing more.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from psycopg import sql

from coordinator.config import CoordinatorSettings
from oncebox.local import LocalPostgres
from oncebox.local.jars import cache_folder, kafka_jars
from oncebox.local.java import find_java
from oncebox.local.ports import HOST, free_ports
from oncebox.local.postgres import find_binaries
from oncebox.producer import Producer
from proof.bench.instances import wait_until_shared
from proof.faults.process import ChildProcess, http_ok
from spark_jobs.verdict import EXIT_ERROR
from tests.support import deploy
from tests.support.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

BROKERS = ("kafka-1", "kafka-2", "kafka-3")
COORDINATORS = ("coordinator-1", "coordinator-2")
HTTP_PORTS = {"coordinator-1": 7172, "coordinator-2": 7172, "relay": 7182}
# Names and ports of containers, as they stand in addresses: "kafka-1:9092", and ":9092" of a listener.
ADDRESS = re.compile(r"(?P<before>//|@|,|^)(?P<name>[a-z]+-\d)?:(?P<port>\d+)")
PROBED = re.compile(r"127\.0\.0\.1(?P<mark>[:/])(?P<port>\d+)")
START_TIMEOUT_S = 120.0
RECONCILED_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """compose.yaml with every container's port at a free one of this machine."""

    services: Mapping[str, Mapping[str, Any]]
    ports: Mapping[tuple[str, int], int]  # of a container's own port

    def environment(self, name: str) -> dict[str, str]:
        def address(match: re.Match[str]) -> str:
            return f"{match['before']}{HOST}:{self.port(match['name'] or name, int(match['port']))}"

        return {key: ADDRESS.sub(address, value) for key, value in self.services[name]["environment"].items()}

    def port(self, name: str, inside: int) -> int:
        """A port of a variable in compose.yaml is the same inside and outside."""
        return self.ports.get((name, inside), inside)

    def is_healthy(self, name: str, path: str = "") -> bool:
        """Runs the service's own check."""

        def probed(match: re.Match[str]) -> str:
            return f"{HOST}{match['mark']}{self.port(name, int(match['port']))}"

        command = [PROBED.sub(probed, word) for word in self.services[name]["healthcheck"]["test"][1:]]
        environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    inside = [*((name, port) for name in BROKERS for port in (9092, 9093, 9094))]
    inside += HTTP_PORTS.items()
    free = free_ports(len(inside) + len(COORDINATORS))
    ports = dict(zip(inside, free, strict=False))
    given = {**deploy.PASSWORD}
    given |= {f"KAFKA_{number}_PORT": str(ports[f"kafka-{number}", 9094]) for number in (1, 2, 3)}
    given |= {f"COORDINATOR_{number}_PORT": str(free[-number]) for number in (1, 2)}
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith(("KAFKA_", "ONCEBOX_"))]:
            patch.delenv(variable)
        yield Outside(services=deploy.services(given), ports=ports)


@pytest.fixture(scope="module")
def brokers(outside: Outside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """All three as one cluster; broker → its environment."""
    folder = tmp_path_factory.mktemp("compose-kafka")
    environments = {}
    with ExitStack() as stack:
        children = {}
        for name in BROKERS:
            environments[name] = {**outside.environment(name), "KAFKA_LOG_DIRS": str(folder / name / "data")}
            set_up(folder / name, environments[name])
            command = [*java(folder / name, environments[name]), "kafka.Kafka", "config/server.properties"]
            assert not outside.is_healthy(name)
            children[name] = stack.enter_context(
                ChildProcess(command, log=folder / f"{name}.log", directory=folder / name)
            )
        for name, child in children.items():
            child.wait_ready(partial(outside.is_healthy, name), timeout_s=START_TIMEOUT_S)
        yield environments


def java(folder: Path, environment: Mapping[str, str]) -> list[str]:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", f"-Djava.io.tmpdir={temporary}"]
    options += environment["KAFKA_HEAP_OPTS"].split()
    return [os.path.join(find_java(), "bin", "java"), *options, "-cp", f"{kafka_jars()}/*"]


def set_up(folder: Path, environment: Mapping[str, str]) -> None:
    """As the image does at its start: the configuration from the variables, then the storage's format."""
    for name in ("default", "mounted", "config"):  # the last is empty at first, as a temporary folder is
        (folder / name).mkdir(parents=True)
    command = [
        *java(folder, environment),
        "kafka.docker.KafkaDockerWrapper",
        "setup",
        "--default-configs-dir",
        "default",
    ]
    command += ["--mounted-configs-dir", "mounted", "--final-configs-dir", "config"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A service's folder of commands in what stands for the image's /opt/oncebox."""
    folder = tmp_path_factory.mktemp("compose-image")
    wheel = deploy.build_wheel(folder)

    @cache
    def make(service: str) -> Path:
        home = folder / service
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        python = str(home / "bin" / "python")
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*install, str(wheel)], check=True)
        packages = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        for pin in deploy.pins(deploy.ROOT / "deploy" / f"{service}.lock"):
            if pin.requirement.marker is None or pin.requirement.marker.evaluate():
                link(pin, packages)
        return home / "bin"

    return make


def link(pin: deploy.Pin, packages: Path) -> None:
    """What is pinned, from where it is installed for the tests."""
    installed = distribution(pin.requirement.name)
    assert installed.version in pin.requirement.specifier
    for part in {file.parts[0] for file in installed.files or () if file.parts[0] not in {"..", "__pycache__"}}:
        if not (packages / part).exists():  # several share the folder google
            (packages / part).symlink_to(str(installed.locate_file(part)))


@pytest.mark.kafka
@pytest.mark.parametrize("name", BROKERS)
def test_a_broker_takes_every_setting(brokers: dict[str, dict[str, str]], name: str):
    """A property that Kafka does not know is told without a value."""
    properties = deploy.kafka_properties(brokers[name])
    admin = AdminClient({"bootstrap.servers": host_address(brokers[name]), "log_level": 0})
    broker = ConfigResource(ConfigResource.Type.BROKER, properties["node.id"])
    told = admin.describe_configs([broker], request_timeout=60)[broker].result(60)
    assert {key: told[key].value for key in properties} == properties


def container(
    outside: Outside, name: str, image: Callable[[str], Path], folder: Path, changes: Mapping[str, str]
) -> ChildProcess:
    """A service's own command in its own environment; `changes`: where this machine has other hosts and folders."""
    service = outside.services[name]
    command = [str(image(service["build"]["args"]["SERVICE"]) / "oncebox"), *service["command"]]
    given = {config["target"]: config["source"] for config in service.get("configs", [])}
    configs = deploy.compose()["configs"]
    command = [str(deploy.ROOT / configs[given[word]]["file"]) if word in given else word for word in command]
    environment = {**outside.environment(name), **changes}
    return ChildProcess(command, log=folder / f"{name}.log", environment=environment, directory=folder)


def at_home(outside: Outside, name: str) -> dict[str, str]:
    """What listens to the whole private network there listens to this machine alone here."""
    prefix = f"ONCEBOX_{name.partition('-')[0].upper()}"
    return {f"{prefix}_LISTEN_HOST": HOST, f"{prefix}_HTTP_PORT": str(outside.port(name, HTTP_PORTS[name]))}


async def until_ready(child: ChildProcess, outside: Outside, name: str) -> None:
    url = f"http://{HOST}:{outside.port(name, HTTP_PORTS[name])}/ready"
    await asyncio.to_thread(child.wait_ready, partial(http_ok, url), timeout_s=START_TIMEOUT_S)


async def until_healthy(child: ChildProcess, outside: Outside, name: str, path: str) -> None:
    """By its own check, which on a busy machine may fail once."""
    healthy = partial(outside.is_healthy, name, path)
    await asyncio.to_thread(child.wait_ready, healthy, timeout_s=START_TIMEOUT_S)


async def stop(child: ChildProcess, outside: Outside, name: str, code: int = 0) -> None:
    grace_s = float(outside.services[name]["stop_grace_period"].removesuffix("s"))
    assert await asyncio.to_thread(child.stop, timeout_s=grace_s) == code, child.log.read_text()


@pytest.mark.kafka
async def test_coordinators_serve_until_they_are_told_to_stop(
    brokers: dict[str, dict[str, str]], outside: Outside, image: Callable[[str], Path], tmp_path: Path
):
    path = str(image("coordinator"))
    with ExitStack() as stack:
        children = {}
        for name in COORDINATORS:
            assert not outside.is_healthy(name, path)
            child = container(outside, name, image, tmp_path, at_home(outside, name))
            children[name] = stack.enter_context(child)
        for name, child in children.items():
            await until_ready(child, outside, name)
            await until_healthy(child, outside, name, path)
        addresses = {advertised(outside, name) for name in COORDINATORS}
        partitions = CoordinatorSettings.model_fields["log_partitions"].default
        await asyncio.to_thread(wait_until_shared, sorted(addresses), partitions)
        await commit_and_read(brokers, min(addresses))
        for name, child in children.items():
            await stop(child, outside, name)
            assert not outside.is_healthy(name, path)


def advertised(outside: Outside, name: str) -> str:
    return outside.environment(name)["ONCEBOX_COORDINATOR_ADVERTISED_ADDRESS"]


def test_the_image_of_the_reconciliation_has_all_that_it_imports(image: Callable[[str], Path]):
    code = (
        "import importlib, pkgutil, spark_jobs, jinja2, prometheus_client, psycopg\n"
        "for each in pkgutil.walk_packages(spark_jobs.__path__, 'spark_jobs.'): importlib.import_module(each.name)"
    )
    python = str(image("spark") / "python")
    # Isolated: from the image alone, whatever PYTHONPATH says.
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("to_its_end", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_the_relay_copies_and_the_reconciliation_looks_at_it(
    brokers: dict[str, dict[str, str]], outside: Outside, image: Callable[[str], Path], tmp_path: Path, to_its_end: bool
):
    """The three services of one pipeline, on the topics and tables of deploy/relay.yaml. A reconciliation comes to its
    verdict only in the long tests, here at least as far as both sides; then it is told to stop.
    """
    reports = tmp_path / "reports"
    check = deploy.check_at(
        outside.services["reconciliation"],
        reports,
        outside.services["reconciliation"]["environment"]["ONCEBOX_RECONCILE_METRICS_FILE"],
    )
    with LocalPostgres(tmp_path / "postgres") as postgres, ExitStack() as stack:
        named = {
            "ONCEBOX_DSN": postgres.dsn.replace(f":{postgres.password}@", "@"),
            "PGPASSWORD": postgres.password,
        }
        relay_changes = at_home(outside, "relay") | {**named, "ONCEBOX_RELAY_LISTEN_PORT": "0"}
        # The cache is the tests' own: the volume's would be filled by a download.
        reconciliation_changes = {
            **named,
            "ONCEBOX_RECONCILE_REPORT_FOLDER": str(reports),
            "ONCEBOX_RECONCILE_METRICS_FILE": str(reports / "reconcile.prom"),
            "XDG_CACHE_HOME": str(cache_folder().parent),
        }
        first = COORDINATORS[0]
        coordinator = container(outside, first, image, tmp_path, at_home(outside, first))
        await until_ready(stack.enter_context(coordinator), outside, first)
        await write_orders(brokers, advertised(outside, first), postgres.dsn)

        relay = container(outside, "relay", image, tmp_path, relay_changes)
        await until_ready(stack.enter_context(relay), outside, "relay")
        await until_healthy(relay, outside, "relay", str(image("relay")))
        await asyncio.to_thread(relay.wait_ready, partial(is_copied, postgres.dsn), timeout_s=START_TIMEOUT_S)

        assert not passes(check)
        reconciliation = container(outside, "reconciliation", image, tmp_path, reconciliation_changes)
        stack.enter_context(reconciliation)
        seen = "1 tables, 1 partitions" if not to_its_end else "report: "
        await asyncio.to_thread(
            reconciliation.wait_ready, partial(reconciliation.log_contains, seen), timeout_s=RECONCILED_TIMEOUT_S
        )
        assert passes(check) == to_its_end
        if to_its_end:
            assert 'oncebox_reconcile_verdict{relay="orders"} 0.0' in (reports / "reconcile.prom").read_text()
        # In the middle of a run it can say nothing of the rows; between two runs the last verdict stands.
        await stop(reconciliation, outside, "reconciliation", code=0 if to_its_end else EXIT_ERROR)
        for name, child in (("relay", relay), (first, coordinator)):
            await stop(child, outside, name)


def passes(check: Sequence[str]) -> bool:
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


async def write_orders(brokers: Mapping[str, Mapping[str, str]], coordinator: str, dsn: str) -> None:
    """The topic and the table that deploy/relay.yaml names, and one transaction for them."""
    servers = ",".join(host_address(environment) for environment in brokers.values())
    # The brokers are the module's: the topic may be there already, with the same orders.
    if not await asyncio.to_thread(has_topic, servers, "orders"):
        await asyncio.to_thread(create_topic, servers, name="orders")
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, item text, oncebox_source integer, oncebox_offset bigint)"
        )
    async with (
        Producer(servers, coordinator, transactional_id="orders") as producer,
        producer.transaction() as open_one,
    ):
        for number in range(10):
            await open_one.send("orders", json.dumps({"id": number, "item": "tea"}).encode())


def has_topic(servers: str, name: str) -> bool:
    topics: dict[str, Any] = AdminClient({"bootstrap.servers": servers, "log_level": 0}).list_topics(timeout=30).topics
    return name in topics


def is_copied(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT count(*) FROM orders").fetchone() == (10,)


async def commit_and_read(brokers: Mapping[str, Mapping[str, str]], coordinator: str) -> None:
    """One transaction, by way of the addresses for clients on this machine."""
    servers = ",".join(host_address(environment) for environment in brokers.values())
    topic = await asyncio.to_thread(create_topic, servers)
    async with (
        Producer(servers, coordinator, transactional_id="compose") as producer,
        producer.transaction() as open_one,
    ):
        await open_one.send(topic, b"whole")
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest", "log_level": 0}
    )
    try:
        consumer.subscribe([topic])
        (message,) = await asyncio.to_thread(consumer.consume, 1, 60)
        assert message.value() == b"whole"
    finally:
        consumer.close()


def host_address(environment: Mapping[str, str]) -> str:
    return deploy.endpoints(environment["KAFKA_ADVERTISED_LISTENERS"])["HOST"]


@pytest.mark.postgres
def test_the_database_takes_every_setting(tmp_path: Path):
    service = deploy.services()["postgres"]
    server, *options = service["command"]
    assert server == "postgres"
    assert set(options[::2]) == {"-c"}
    settings = dict(option.split("=") for option in options[1::2])
    with LocalPostgres(tmp_path / "postgres", settings=settings) as postgres:
        with psycopg.connect(postgres.dsn) as connection:
            for name, value in settings.items():
                assert connection.execute("SELECT current_setting(%s)", [name]).fetchone() == (value,)
        outside = Outside(services={"postgres": service}, ports={("postgres", 5432): postgres.port})
        assert is_up(outside)
    assert not is_up(outside)


def is_up(outside: Outside) -> bool:
    check = outside.services["postgres"]["healthcheck"]["test"][1:]
    port = str(outside.port("postgres", 5432))
    command = [port if word == "5432" else word for word in check]
    command[0] = str(find_binaries() / command[0])
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["relay", "reconciliation"])
def test_a_password_may_have_any_characters(name: str, database: str, monkeypatch: pytest.MonkeyPatch):
    awkward = """p@ss/w%rd: "quoted' \\ #?&="""
    environment = deploy.services({"POSTGRES_PASSWORD": awkward})[name]["environment"]
    place = database.rpartition("@")[2]
    user = f"{name}_{uuid4().hex[:8]}"
    with psycopg.connect(database, autocommit=True) as connection:
        role = sql.Identifier(user)
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(awkward)))
        try:
            monkeypatch.setenv("PGPASSWORD", environment["PGPASSWORD"])
            there = environment["ONCEBOX_DSN"].replace("oncebox@postgres:5432/oncebox", f"{user}@{place}")
            with psycopg.connect(there) as session:
                assert session.info.user == user
                assert session.info.password == awkward  # which Spark is given
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(role))
