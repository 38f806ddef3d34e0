"""What ends a run before it has begun is exit code 4, by the command and by spark-submit alike; and TLS for Spark."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from oncebox import cli
from oncebox.local.java import JavaMissingError
from oncebox.wire import KafkaSettings
from spark_jobs.jobs import backfill, reconcile
from spark_jobs.jobs.reconcile import main
from spark_jobs.sources import kafka_options

if TYPE_CHECKING:
    from pathlib import Path


def by_command(*arguments: str, name: str = "run") -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["reconcile", name, *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Settings that are complete."""
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", "localhost:1")
    monkeypatch.setenv("ONCEBOX_DSN", "postgresql://nobody@localhost:1/none")
    monkeypatch.setenv("ONCEBOX_RECONCILE_REPORT_FOLDER", str(tmp_path / "reports"))
    return tmp_path


def test_settings_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], places: Path
):
    assert main(["--no-such-flag"]) == 4
    gone = ["--config", str(tmp_path / "no-such-file.yaml")]
    assert (main(gone), by_command(*gone)) == (4, 4)
    assert capsys.readouterr().err.count("no-such-file.yaml") == 2
    monkeypatch.delenv("ONCEBOX_DSN")
    assert (main([]), by_command()) == (4, 4)
    assert capsys.readouterr().err.count("ONCEBOX_DSN") == 2


def test_a_report_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: Path
):
    (places / "file").write_text("")
    monkeypatch.setenv("ONCEBOX_RECONCILE_REPORT_FOLDER", str(places / "file" / "reports"))
    assert (main([]), by_command()) == (4, 4)
    told = capsys.readouterr()
    assert told.err.count("cannot be made") == 2
    assert "Traceback" not in told.out + told.err


def test_no_java(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: Path):
    def none() -> str:
        raise JavaMissingError("Oncebox needs Java 17 or 21")

    monkeypatch.setattr("oncebox.local.java.find_java", none)
    assert by_command() == 4
    assert "needs Java 17 or 21" in capsys.readouterr().err


def test_spark_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: Path):
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    def fail(_: object) -> None:
        raise PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited\nand more")

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", fail)
    assert main([]) == 4
    assert "Spark does not start: [JAVA_GATEWAY_EXITED]" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("gone"), ssl.SSLError("[X509] no certificate"), OverflowError("a\nb")])
def test_what_nobody_has_thought_of(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], places: Path
):
    """An exit code of 1 would say that there are findings."""

    def fail(*_: object, **__: object) -> None:
        raise error

    for job in (reconcile, backfill):
        monkeypatch.setattr(job, "run", fail)
    monkeypatch.setattr("spark_jobs.session.submitted_session", lambda: None)
    codes = (main([]), backfill.main(["shop.orders"]), by_command(), by_command("shop.orders", name="backfill"))
    assert codes == (4, 4, 4, 4)
    told = capsys.readouterr()
    told_lines = [line for line in told.err.splitlines() if "starting Spark" not in line]
    assert len(told_lines) == 4
    assert all(str(error).splitlines()[0] in line for line in told_lines)


def test_spark_gets_to_kafka_by_the_same_certificates(tmp_path: Path):
    plain = kafka_options(KafkaSettings(bootstrap_servers="k:1"))
    assert plain == {"kafka.bootstrap.servers": "k:1"}
    # Without an authority of one's own Java's count; an empty store would trust nobody.
    public = kafka_options(KafkaSettings(bootstrap_servers="k:1", security_protocol="SSL"))
    assert [name for name in public if "truststore" in name or "keystore" in name] == []
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(f"PEM of {name}")
    own = kafka_options(
        KafkaSettings(
            bootstrap_servers="k:1",
            security_protocol="SSL",
            ssl_ca_location=str(tmp_path / "ca"),
            ssl_certificate_location=str(tmp_path / "cert"),
            ssl_key_location=str(tmp_path / "key"),
            ssl_key_password="secret",
            ssl_endpoint_identification_algorithm="none",
        )
    )
    assert own == {
        "kafka.bootstrap.servers": "k:1",
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.certificates": "PEM of ca",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": "PEM of cert",
        "kafka.ssl.keystore.key": "PEM of key",
        "kafka.ssl.key.password": "secret",
        "kafka.ssl.endpoint.identification.algorithm": "",
    }
