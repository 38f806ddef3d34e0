"""What a relay tells programs after real work: every metric, and the commands' JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from confluent_kafka import Producer

from tests.support.relay import GUARD, Relays

if TYPE_CHECKING:
    from oncebox.local import LocalKafka
    from proof.faults.process import ChildProcess
    from tests.support.kafka import TopicFactory


def send(kafka: LocalKafka, topic: str, *values: object, at_ms: int = 0) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number, value in enumerate(values):
        producer.produce(topic, json.dumps(value).encode(), key=b"%d" % number, timestamp=at_ms)
    producer.flush(30)


def asked(relays: Relays, *words: str, code: int = 0) -> Any:
    return json.loads(run(relays, *words, "--json", code=code))


def run(relays: Relays, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-c", "from oncebox.cli import main; main()", "relay", *words]
    done = subprocess.run(
        [*command, "--config", str(relays.config)], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def metrics(relay: ChildProcess) -> dict[str, float]:
    found = re.search(r", http (\d+)", relay.log.read_text())
    assert found
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics") as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_metrics_and_json(kafka: LocalKafka, new_topic: TopicFactory, relays: Relays) -> None:
    topic = new_topic()
    relays.run(f"CREATE TABLE paid (id bigint PRIMARY KEY, {GUARD})")
    relays.configure([{"topic": topic, "table": "paid", "key": "id"}], on_error="park")
    send(kafka, topic, {"id": 1}, {"id": 2}, {"id": "no number"})
    assert [each["is_ok"] for each in asked(relays, "check", code=1)].count(False) == 1
    relay = relays.start()
    relays.wait_for("SELECT state FROM oncebox.dead_letter", [("parked",)])
    assert relays.rows("SELECT id FROM paid ORDER BY id") == [(1,), (2,)]

    (letter,) = asked(relays, "dead-letters", "list")
    assert (letter["topic"], letter["record_offset"], letter["state"]) == (topic, 2, "parked")
    assert json.loads(b64decode(letter["value"])) == {"id": "no number"}
    status = asked(relays, "status")
    assert (status["relay"], status["is_paused"], status["open_letters"]) == (relays.name, False, 1)
    (place,) = status["partitions"]
    assert (place["topic"], place["next_offset"], place["end_offset"], place["lag_records"]) == (topic, 3, 3, 0)

    mine, at = f'relay="{relays.name}"', f'{{partition="0",relay="{relays.name}",topic="{topic}"}}'
    shown = metrics(relay)
    assert shown[f'oncebox_relay_state{{{mine},state="RUNNING"}}'] == 1
    assert shown[f'oncebox_relay_state{{{mine},state="WAITING"}}'] == 0
    assert shown[f"oncebox_relay_rows_total{{{mine}}}"] == 2
    assert shown[f"oncebox_relay_batches_total{{{mine}}}"] >= 1
    assert shown[f"oncebox_relay_retries_total{{{mine}}}"] == 0
    assert shown[f"oncebox_relay_dead_letters{{{mine}}}"] == 1
    assert shown[f"oncebox_relay_lag_records{at}"] == 0
    assert f"oncebox_relay_lag_seconds{at}" in shown
    # What it has not applied yet is as old as the oldest of it, whenever something was applied before.
    assert shown[f"oncebox_relay_lag_seconds{at}"] == 0
    run(relays, "pause")
    relays.wait_until(lambda: metrics(relay)[f'oncebox_relay_state{{{mine},state="PAUSED"}}'] == 1, relay.log_tail)
    for age_s in (3600, 0):
        send(kafka, topic, {"id": 3}, at_ms=int((time.time() - age_s) * 1000))
    shown = metrics(relay)
    assert shown[f"oncebox_relay_lag_records{at}"] == 2
    assert 3600 <= shown[f"oncebox_relay_lag_seconds{at}"] < 4200
    (place,) = asked(relays, "status")["partitions"]
    assert 3_600_000 <= place["lag_ms"] < 4_200_000
    assert asked(relays, "status")["offsets_per_second"] == 0
    assert "applies 0 offsets/s" in run(relays, "status")
    assert {name.partition("{")[0] for name in shown} == documented(), "every one is looked at"


def documented() -> set[str]:
    from tests.support.deploy import ROOT

    page = (ROOT / "docs/reference/metrics.md").read_text()
    return set(re.findall(r"^\| `(oncebox_relay_\w+)`", page, re.MULTILINE))
