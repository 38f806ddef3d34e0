"""Alarms, dashboard and the compose files beside compose.yaml: every metric exists, every setting is one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from coordinator.config import CoordinatorSettings
from coordinator.telemetry import CATALOGUE, PREFIX
from oncebox.settings import load
from relay.outbox.metrics import Metrics
from tests.support import deploy

if TYPE_CHECKING:
    from pathlib import Path

ROOT = deploy.ROOT
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
PROMETHEUS = ROOT / "deploy/prometheus/prometheus.yaml"
ALARMS = {
    rule["alert"]: rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
}
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
NAME = re.compile(r"\b(oncebox_(?:coordinator|relay|outbox|reconcile)_\w+|process_\w+)")
SELECTED = re.compile(r"\b(oncebox_coordinator_\w+)\{([^}]*)\}")


def exposed() -> dict[str, tuple[str, ...]]:
    """Every name of a series, with its labels."""
    names: dict[str, tuple[str, ...]] = {}
    for metric in CATALOGUE:
        endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[metric.kind]
        for ending in endings:
            names[PREFIX + metric.name + ending] = metric.labels
    return names


def expressions() -> list[str]:
    panels = [panel for dashboard in DASHBOARDS for panel in json.loads(dashboard.read_text())["panels"]]
    return [*ALARMS.values()] + [target["expr"] for panel in panels for target in panel["targets"]]


def documented() -> set[str]:
    """Those of the other services, as the reference found them in their code."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    return set(re.findall(r"^\| `(oncebox_(?:relay|outbox|reconcile)_\w+)`", page, re.MULTILINE))


def test_every_metric_that_is_asked_for_exists():
    known = exposed()
    for expression in expressions():
        for name in NAME.findall(expression):
            process = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
            assert name in known or name in documented() | process, expression
        for name, selector in SELECTED.findall(expression):
            for label in re.findall(r"(\w+)!?=", selector):
                assert label in known[name], expression
        assert expression.count("(") == expression.count(")")


def test_every_metric_is_shown():
    text = "\n".join(expressions())
    assert [metric.name for metric in CATALOGUE if PREFIX + metric.name not in text] == []
    assert len(documented()) >= 20
    assert [name for name in documented() if name not in text] == []


def test_every_alarm_says_what_to_do():
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "action"}
        for page in re.findall(r"docs/[\w./-]+\.md", rule["annotations"]["action"]):
            assert (ROOT / page).exists()


def test_an_alarm_about_too_few_is_heard_when_there_are_none():
    """A sum over no series is no series, and equal to nothing: each needs a 0 to fall back to."""
    few = {name: expression for name, expression in ALARMS.items() if re.search(r"(==|<=?) 0$", expression)}
    assert {"OnceboxNobodyServes", "OnceboxRelayNobodyRuns", "OnceboxOutboxNobodyRuns"} <= few.keys()
    for name, expression in few.items():
        found = re.fullmatch(r"\((sum\(.*?\)(?: by \((\w+)\))?) or (.*)\) == 0", expression)
        if not expression.startswith("up{"):
            assert found, name
            now, label, otherwise = found.groups()
            series = re.search(r"\w+\{.*?\}", now)
            assert series
            # By a label, those are meant that were there in the days before.
            lately = f"sum(max_over_time({series[0]}[7d])) by ({label}) * 0"
            assert otherwise == (lately if label else "vector(0)"), name


def test_every_service_that_does_not_answer_is_heard_of():
    jobs = {each["job_name"] for each in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}
    watched = [re.search(r'\bup\{job=~?"(.*?)"\}', expression) for expression in ALARMS.values()]
    patterns = [found[1] for found in watched if found]
    for job in (*jobs, "oncebox-outbox"):
        assert any(re.fullmatch(pattern, job) for pattern in patterns), job
    # Scraped whether or not it runs: it is only missed when it was there.
    up = 'up{job=~"oncebox-(relay|outbox|reconciliation)"}'
    expected = f"avg_over_time({up}[10m]) < 0.9 and max_over_time({up}[7d]) == 1"
    assert ALARMS["OnceboxPartDown"] == expected


def test_an_enumerations_label_is_its_own_name():
    labels = {sample.name: set(sample.labels) for family in Metrics().registry.collect() for sample in family.samples}
    for expression in expressions():
        for name, selector in re.findall(r"\b(oncebox_outbox_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)!?=", selector)) <= labels[name], expression


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda file: file.name)
def test_panels_do_not_overlap(dashboard: Path):
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert at["x"] + at["w"] <= 24


@pytest.mark.parametrize("file", deploy.OVERLAYS, ids=lambda file: file.name)
def test_overlays_follow_the_schema(file: Path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_is_added_is_hardened_and_published_on_loopback():
    services: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.observe.yaml").read_text())["services"]
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert int(service["user"].partition(":")[0]) > 0
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["healthcheck"]["test"][0] == "CMD"
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists()


@pytest.mark.parametrize("name", ["coordinator-1", "coordinator-2"])
def test_with_tls_a_coordinator_listens_without_insecure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    overlay = yaml.safe_load((ROOT / "deploy/compose.tls.yaml").read_text())["services"][name]
    environment = {**deploy.services()[name]["environment"], **overlay["environment"]}
    for variable in [each for each in os.environ if each.startswith("ONCEBOX_")]:
        monkeypatch.delenv(variable)
    for variable, value in environment.items():
        if value.startswith("/run/oncebox/"):
            (tmp_path / value.rpartition("/")[2]).touch()
        monkeypatch.setenv(variable, value.replace("/run/oncebox", str(tmp_path)))
    settings = load(CoordinatorSettings)
    assert settings.tls is not None
    assert settings.has_identity
    assert not settings.insecure_listen
    assert settings.listen_host == "0.0.0.0"
