"""As a user meets it: the commands, the helpers for services, and what the guides show."""

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Session

from oncebox.outbox import EMIT, INSERT, OutboxMixin, event, message
from proof.faults.process import ChildProcess
from tests.integration.outbox.conftest import Outbox
from tests.support.coordinator import read_committed
from tests.support.kafka import create_topic

ROOT = Path(__file__).parents[3]
ONCEBOX = Path(sys.executable).with_name("oncebox")


class Base(DeclarativeBase):
    pass


class OutboxEvent(OutboxMixin, Base):
    pass


def oncebox(*arguments: str, answer: str = "") -> str:
    done = subprocess.run([ONCEBOX, *arguments], capture_output=True, text=True, check=False, input=answer, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics_at(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        return str(page.read().decode())


def status_of(config: Path) -> Any:
    (status,) = json.loads(oncebox("outbox", "status", "--config", str(config), "--json"))
    return status


def test_commands_and_helpers(outbox: Outbox, tmp_path: Path):
    kind = uuid.uuid4().hex[:8]
    create_topic(outbox.one.bootstrap_servers, f"outbox.event.{kind}")
    config = tmp_path / "outbox.yaml"
    config.write_text(
        f"kafka: {{bootstrap_servers: '{outbox.one.bootstrap_servers}'}}\npostgres: {{dsn: '{outbox.dsn}'}}\n"
        f"coordinators: '{outbox.one.addresses[0]}'\nname: {outbox.suffix}\nslot: slot_{outbox.suffix}\n"
    )
    shown = oncebox("outbox", "init", "--config", str(config), answer="y\n")
    assert "CREATE PUBLICATION" in shown
    assert "pg_create_logical_replication_slot" in shown
    again = oncebox("outbox", "init", "--config", str(config), "--yes")
    assert "CREATE PUBLICATION" not in again
    with psycopg.connect(outbox.dsn) as connection:
        connection.execute(INSERT, event(kind, "1", "made", {"a": 1}, headers={"h": "v"}))
        connection.execute(EMIT, message(kind, "2", "told", {"b": 2}))
        connection.execute(INSERT, event(kind, "3", "gone", None))
    engine = create_engine(outbox.dsn.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        session.add(OutboxEvent(aggregatetype=kind, aggregateid="4", type="made", payload={"c": 3}))
    engine.dispose()
    command = [str(ONCEBOX), "outbox", "run", "--config", str(config), "--http-port", "0"]
    with ChildProcess(command, log=tmp_path / "run.log") as process:
        process.wait_ready(lambda: len(read_committed(outbox.one.bootstrap_servers, f"outbox.event.{kind}")) == 4)
        told = re.search(r"metrics at (\S+)", process.log.read_text())
        assert told is not None
        # A reader may see the rows before the relay has noted that they are published.
        process.wait_ready(lambda: "oncebox_outbox_rows_total 4.0" in metrics_at(told[1]))
        assert "oncebox_outbox_slot_bytes" in metrics_at(told[1])
        process.wait_ready(lambda: status_of(config)["rows_published"] == 4)
        assert f"{outbox.suffix}: RUNNING" in oncebox("outbox", "status", "--config", str(config))
        status = status_of(config)
        assert (status["name"], status["state"], status["rows_published"]) == (outbox.suffix, "RUNNING", 4)
        assert json.loads(oncebox("outbox", "parked", "--config", str(config), "--json")) == []
        assert "pauses" in oncebox("outbox", "pause", "--config", str(config))
        assert "goes on" in oncebox("outbox", "resume", "--config", str(config))
        assert process.stop() == 0
    seen = read_committed(outbox.one.bootstrap_servers, f"outbox.event.{kind}")
    assert [(each.key(), each.value()) for each in seen] == [
        (b"1", b'{"a": 1}'),
        (b"2", b'{"b": 2}'),
        (b"3", None),
        (b"4", b'{"c": 3}'),
    ]
    looked = oncebox("outbox", "resync", "--config", str(config))
    assert "3 rows in the table: 3 are published" in looked
    assert json.loads(oncebox("outbox", "resync", "--config", str(config), "--json"))["published"] == 3
    resolved = oncebox("outbox", "resolve", "--config", str(config), "--prune-days", "7")
    assert "nothing waits" in resolved


def test_a_database_that_is_not_there_is_told_in_one_line():
    command = [str(ONCEBOX), "outbox", "status", "--dsn", "postgresql://nobody:secret@127.0.0.1:9/none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 1
    assert done.stderr.startswith("oncebox: the database: ")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


async def test_the_guides_snippets_run(outbox: Outbox, tmp_path: Path):
    await asyncio.to_thread(
        oncebox, "outbox", "init", "--dsn", outbox.dsn, "--name", outbox.suffix, "--source", "commit_seq", "--yes"
    )
    async with await outbox.connect() as connection:
        await connection.execute("CREATE TABLE paid (order_id bigint, amount bigint)")
    topic = f"payments-{outbox.suffix}"
    create_topic(outbox.one.bootstrap_servers, topic)
    replaced = {
        "localhost:9092": outbox.one.bootstrap_servers,
        "localhost:7171": outbox.one.addresses[0],
        "postgresql://localhost/shop": outbox.dsn,
        '"payments"': f'"{topic}"',
        "shop-1": f"shop-{outbox.suffix}",
    }
    for page in ("outbox.md", "atomic.md"):
        (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
        for old, new in replaced.items():
            snippet = snippet.replace(old, new)
        script = tmp_path / f"{page}.py"
        script.write_text(snippet)
        await asyncio.to_thread(subprocess.run, [sys.executable, str(script)], check=True, timeout=180)
    assert await outbox.fetch("SELECT aggregateid FROM outbox") == [("17",)]
    assert await outbox.fetch("SELECT amount FROM paid") == [(30,)]
    seen = await asyncio.to_thread(read_committed, outbox.one.bootstrap_servers, topic)
    assert [each.value() for each in seen] == [b'{"order": 1, "amount": 30}']
