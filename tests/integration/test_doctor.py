"""`oncebox doctor` on real parts: fit ones, unfit ones, and ones that are not there."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from tests.support.certificates import Authority
from tests.support.listening import listening, pass_on

if TYPE_CHECKING:
    from oncebox.local import LocalKafka, LocalPostgres
    from tests.support.coordinator import Coordinators

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))
SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"


def doctor(*args: str) -> tuple[int, list[Any]]:
    done = subprocess.run(
        [ONCEBOX, "doctor", "--json", *args], capture_output=True, text=True, check=False, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def whats(findings: list[Any], *severities: str) -> list[str]:
    return [each["what"] for each in findings if each["severity"] in severities]


def test_all_parts(shared_coordinator: Coordinators, database: str):
    servers, coordinators = shared_coordinator.bootstrap_servers, ",".join(shared_coordinator.addresses)
    code, findings = doctor("--bootstrap-servers", servers, "--dsn", database, "--coordinators", coordinators)
    assert code == 0, findings
    assert whats(findings, "PROBLEM") == []
    fine = whats(findings, "OK")
    assert any(what.startswith("PostgreSQL") for what in fine)
    assert "4 log partitions are served by 1 instances" in fine
    # One broker and one instance: told, and refused only by those who are strict.
    assert "there is a single coordinator instance" in whats(findings, "WARNING")
    strict, _ = doctor("--bootstrap-servers", servers, "--coordinators", coordinators, "--strict")
    assert strict == 1


def test_a_weak_database_user(postgres: LocalPostgres, database: str):
    name = database.rpartition("/")[2]
    with psycopg.connect(database, autocommit=True) as connection:
        role = f"weak_{name}"
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'hunter22'").format(sql.Identifier(role)))
        connection.execute(sql.SQL("ALTER ROLE {} SET synchronous_commit = off").format(sql.Identifier(role)))
        try:
            weak = f"postgresql://{role}:hunter22@{postgres.host}:{postgres.port}/{name}"
            code, findings = doctor("--dsn", weak, "--skip-coordinator")
        finally:
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
    assert code == 1
    assert set(whats(findings, "PROBLEM")) == {
        "the user may not create a schema in this database",
        "synchronous_commit is off",
    }
    assert whats(findings, "WARNING") == ["the user may not replicate"]
    assert "hunter22" not in json.dumps(findings)


def test_parts_that_are_not_there(kafka: LocalKafka, tmp_path: Path):
    config = tmp_path / "coordinator.yaml"
    config.write_text("kafka: {bootstrap_servers: '127.0.0.1:1'}\nlisten_host: 10.0.0.1\n")
    nobody = ("--dsn", "postgresql://me:hunter22@127.0.0.1:1/x", "--coordinators", "127.0.0.1:1")
    code, findings = doctor("--config", str(config), *nobody)
    assert code == 1
    assert len(whats(findings, "PROBLEM")) == 3
    assert "insecure_listen" in json.dumps(findings)
    assert "hunter22" not in json.dumps(findings)


async def test_tls_to_postgresql(database: str, postgres: LocalPostgres, tmp_path: Path):
    """The local server speaks no TLS: a proxy that ends it stands before it, as a pooler does."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    pair = authority.issue("postgres")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(8) != SSL_REQUEST:
            return
        writer.write(b"S")
        await writer.start_tls(context)
        upstream, downstream = await asyncio.open_connection(postgres.host, postgres.port)
        await asyncio.gather(pass_on(reader, downstream), pass_on(upstream, writer))

    name, access = database.rpartition("/")[2], f"{postgres.user}:{postgres.password}"
    async with listening(serve) as port:
        address = f"postgresql://{access}@127.0.0.1:{port}/{name}?sslmode=verify-full&sslrootcert="
        code, findings = await asyncio.to_thread(doctor, "--dsn", f"{address}{authority.ca}", "--skip-coordinator")
        assert code == 0, findings
        code, findings = await asyncio.to_thread(doctor, "--dsn", f"{address}{stranger.ca}", "--skip-coordinator")
        assert code == 1
        assert whats(findings, "PROBLEM") == ["PostgreSQL cannot be reached"]
        assert "certificate" in json.dumps(findings)
        assert postgres.password not in json.dumps(findings)


def test_nothing_named_is_told():
    code, findings = doctor("--skip-coordinator")
    assert code == 0
    assert whats(findings, "NOTE") == ["Kafka was not looked at", "PostgreSQL was not looked at"]
