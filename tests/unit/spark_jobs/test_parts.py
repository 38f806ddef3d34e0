"""The pure parts: types, jsonb's text, encoded keys, manifests, the page."""

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from oncebox.v1 import log_pb2, manifest_pb2, transaction_pb2
from spark_jobs.columns import Column, ColumnType, Kind, parse_type
from spark_jobs.config import ReconcileSettings
from spark_jobs.cut import PartitionFacts
from spark_jobs.database import Checksum, decode_key
from spark_jobs.errors import CannotCheckError
from spark_jobs.findings import Finding, Sample
from spark_jobs.findings import Kind as FindingKind
from spark_jobs.jobs import audit
from spark_jobs.jobs.audit import render
from spark_jobs.jsonb import jsonb_at, raw_at
from spark_jobs.log_state import NOT_READ, OWED, decode_open, decode_outcomes, not_read
from spark_jobs.manifests import UNKNOWN, decode_manifest
from spark_jobs.publish import metrics_text
from spark_jobs.report import render as render_page
from spark_jobs.result import Coverage, Result, TableFigures, to_json
from spark_jobs.session import translated
from spark_jobs.sources import page_ranges
from spark_jobs.targets import by_table, read_target
from spark_jobs.verdict import Verdict


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bigint", ColumnType(name="bigint", kind=Kind.INTEGER)),
        ("numeric(12,2)", ColumnType(name="numeric(12,2)", kind=Kind.NUMERIC, precision=12, scale=2)),
        ("numeric", ColumnType(name="numeric", kind=Kind.NUMERIC)),
        (
            "timestamp(3) with time zone",
            ColumnType(name="timestamp(3) with time zone", kind=Kind.TIMESTAMPTZ, precision=3),
        ),
        ("text[]", ColumnType(name="text[]", kind=Kind.TEXT, is_array=True)),
        ("inet", None),
        ("mood", None),
    ],
)
def test_types(name, wanted):
    assert parse_type(name) == wanted


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ('{"a": {"bb": 1, "c": 1.50, "c": 2e2}}', '{"c": 200, "bb": 1}'),
        ('{"a": -0.0}', "0.0"),
        ('{"a": "\\u00e9\\n\\u0001\\""}', '"é\\n\\u0001\\""'),
        ('{"a": [true, null, 1e-2]}', "[true, null, 0.01]"),
        ('{"a": null}', None),
        ("{}", None),
        ("not JSON", None),
        ('{"a": NaN}', None),
        ('{"a": 1, "b": 1e99999999999999999999}', "1"),
        ('{"a": 1e999999999}', '"1e999999999"'),  # which jsonb refuses, and a gigabyte of digits
        ('{"a": 0e999999999}', "0"),
    ],
)
def test_jsonb(document, text):
    assert jsonb_at(document, ["a"]) == text


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (r' {"b": {"a": 1}, "a" : {"x":  "\u0000é"} } ', r'{"x":  "\u0000é"}'),
        ('{"a": 1, "\\u0061": [1 ,2]}', "[1 ,2]"),  # the last of equal names
        ('{"a": 1e200000}', "1e200000"),
        ('{"a": ' + "9" * 5_000 + "}", "9" * 5_000),
        ('{"a": "null"}', '"null"'),
        ('{"a": null}', None),
        ('{"b": 1}', None),
        ("{}", None),
        ("[1]", None),
        ('{"a": NaN}', None),
        ('{"a": 1} {', None),
        ('{"a": 1', None),
        (None, None),
    ],
)
def test_json_as_it_was_written(document, text):
    assert raw_at(document, ["a"]) == text


def mapping(columns: list[tuple[str, str]], key: list[str], **more: Any) -> dict[str, Any]:
    listed = [{"name": name, "type": kind, "path": [name], "from": "value", "unit": None} for name, kind in columns]
    return {
        "format": "json", "insert_mode": "upsert", "guard": True, "delete_on_tombstone": True, "key": key,
        "columns": listed,
    } | more  # fmt: skip


def test_columns_that_cannot_be_recomputed_are_told():
    target = read_target("t", "public", "t", mapping([("id", "bigint"), ("at", "inet"), ("all", "jsonb[]")], ["id"]))
    assert [column.name for column in target.columns] == ["id"]
    assert target.unchecked == ("at (type inet)", "all (type jsonb[])")


def test_tables_that_cannot_be_compared_at_all():
    def table(*mappings: dict[str, Any]) -> str | None:
        (one,) = by_table([read_target(f"t{at}", "public", "t", each) for at, each in enumerate(mappings)])
        return one.obstacle

    columns = [("id", "bigint"), ("at", "inet"), ("name", "text")]
    assert table(mapping(columns, ["id"])) is None
    assert table(mapping(columns, ["id"]), mapping(columns[::-1], ["id"])) is None
    assert "key column" in (table(mapping(columns, ["at"])) or "")
    assert "told apart" in (table(mapping(columns, [], guard=False, insert_mode="insert")) or "")
    assert "an ordering column" in (table(mapping(columns, ["id"], ordering="id")) or "")
    assert table(mapping(columns, ["id"], ordering=None)) is None
    assert "different columns" in (table(mapping(columns, ["id"]), mapping(columns[:1], ["id"])) or "")


def test_keys_are_read_back_from_their_encoding():
    target = read_target("t", "public", "t", mapping([("a", "text"), ("b", "bigint"), ("c", "text")], ["a", "b", "c"]))
    assert decode_key(target, "4:é;:-7;0:") == ["é;:", "-7", ""]
    # A NULL is found by the encoding itself; what is none of such a key is found by nothing.
    for text in ("~-7;0:", "4:é;:~0:", "4:é;:-7;~", "", "4:é;:", "4:é;:-7", "9:é;:-7;0:", "x:a-7;0:", "4:é;:-7;0:1;"):
        assert decode_key(target, text) is None


def test_a_checksum_sees_what_xor_alone_does_not():
    one, other = Checksum(), Checksum()
    for digest in (5, 5):
        one.add(1, digest, digest)
    for digest in (9, 9):
        other.add(1, digest, digest)
    assert one.xor == other.xor
    assert one != other


def test_pages_are_all_covered():
    for pages in (0, 1, 127, 128, 129, 10_000):
        ranges = page_ranges(pages, 8)
        assert ranges[0][0] == 0
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
        assert ranges[-1][1] > pages


def test_manifests_and_what_is_none():
    manifest = manifest_pb2.Manifest(transactional_id="a", number=3, producer_id=7, epoch=2, part_count=1)
    written = manifest.written.add(topic="t", partition=1, record_count=2, topic_id=b"\x01" * 16)
    written.runs.add(offset_first=4, offset_next=6)
    row = decode_manifest(manifest_pb2.FeedRecord(version=1, manifest=manifest).SerializeToString())
    assert row is not None
    assert row[:4] == ("a", 3, 7, 2)
    assert row[8:10] == (2, [("t", "01" * 16, 1, 4, 6)])
    leader = manifest_pb2.FeedRecord(version=1, leader=log_pb2.LeaderState(epoch=1))
    assert decode_manifest(leader.SerializeToString()) is None
    broken = decode_manifest(b"\xff\xff")
    assert broken is not None
    assert broken[-2:] == (True, None)
    # Without a version it is nobody's; with a newer one it says nothing, whatever it is.
    nobody = decode_manifest(manifest_pb2.FeedRecord(manifest=manifest).SerializeToString())
    assert nobody is not None
    assert nobody[-2:] == (True, None)
    newer = [
        manifest_pb2.FeedRecord(version=2, manifest=manifest),
        manifest_pb2.FeedRecord(version=2, leader=log_pb2.LeaderState(epoch=1)),
        manifest_pb2.FeedRecord(version=2),
    ]
    for record in newer:
        assert decode_manifest(record.SerializeToString()) == (*UNKNOWN, True, 2)


def test_outcomes_and_open_transactions_of_the_log():
    key = log_pb2.LogKey(transactional_id="a").SerializeToString()
    state = log_pb2.IdState()
    state.outcomes.add(number=1, result=transaction_pb2.ABORTED, cause=transaction_pb2.TIMEOUT, decided_at_ms=5)
    state.transactions.add(number=2, state=transaction_pb2.ONGOING, started_at_ms=9, producer_id=7, epoch=6)
    value = log_pb2.LogValue(version=1, id=state).SerializeToString()
    assert decode_outcomes(key, value) == [("a", 1, 2, 2, 5)]
    assert decode_open(key, value) == [("a", 2, 7, 2, 9, 6)]
    # A commit whose manifest may not be written yet; once it is noted where that stands, it is.
    state.outcomes.add(number=2, result=transaction_pb2.COMMITTED, decided_at_ms=6)
    for noted, result in ((0, OWED), (17, transaction_pb2.COMMITTED)):
        del state.transactions[:]
        state.transactions.add(number=2, state=transaction_pb2.PREPARE_COMMIT, feed_offset_next=noted)
        value = log_pb2.LogValue(version=1, id=state).SerializeToString()
        assert decode_outcomes(key, value) == [("a", 1, 2, 2, 5), ("a", 2, result, 0, 6)]
    assert decode_outcomes(key, None) == []
    leader = log_pb2.LogKey(leader=True).SerializeToString()
    assert decode_outcomes(leader, log_pb2.LogValue(version=1, leader=log_pb2.LeaderState()).SerializeToString()) == []


def test_records_of_the_log_that_cannot_be_read_are_told():
    key = log_pb2.LogKey(transactional_id="a").SerializeToString()
    value = log_pb2.LogValue(version=1, id=log_pb2.IdState()).SerializeToString()
    newer = log_pb2.LogValue(version=2, id=log_pb2.IdState()).SerializeToString()
    unknown = log_pb2.LogValue(version=1).SerializeToString()
    assert decode_outcomes(key, newer) == [("", 0, NOT_READ, 2, 0)]
    for wrong in ((None, value), (b"", value), (b"\xff\xff", value), (key, b"\xff\xff"), (key, unknown), (b"", None)):
        assert decode_outcomes(*wrong) == [("", 0, NOT_READ, 0, 0)]
        assert decode_open(*wrong) == []
    told = not_read("log", {0: 3, 2: 1})
    assert "log holds 3 records that cannot be read" in told
    assert "log holds 1 records of version 2, this process reads up to 1: upgrade it" in told
    assert not_read("log", {}) == ""


def result(**more: Any) -> Result:
    given: dict[str, Any] = {
        "verdict": Verdict.FINDINGS,
        "sentence": "2 findings",
        "kind": "incremental",
        "since_run": 4,
        "relay": "shop",
        "mode": "transaction",
        "started_at_ms": 1_767_225_600_000,
        "duration_ms": 2_500,
        "snapshot": "1:2:",
        "xmin": 1,
        "lsn": "0/1",
        "config_hash": "abc",
        "feed": {"0": (0, 4)},
        "findings": (
            Finding(
                kind=FindingKind.ROW_MISSING,
                where="public.<orders>",
                count=2,
                samples=(
                    Sample(key={"id": "<script>alert(1)</script>"}, expected="orders:0:5", detail="transaction a"),
                ),
            ),
        ),
        "unchecked": ("the topic gone does not exist",),
        "told": ("the log is <long>",),
        "parked": {"parked": 3},
        "lag": 12,
        "transactions": 9,
        "tables": (
            TableFigures(
                table="public.orders",
                rows_expected=5,
                rows_found=3,
                buckets=1,
                buckets_differing=1,
                superseded=0,
                touched=0,
            ),
        ),
        "coverage": (
            Coverage(
                topic="orders",
                partition=0,
                source=1,
                log_start=10,
                start=0,
                verified=20,
                next=80,
                stable=90,
                high=100,
                compared=60,
            ),
        ),
        "run": 5,
    }
    return Result(**(given | more))


def test_the_page_stands_alone_and_escapes_what_it_shows():
    started = datetime(2026, 1, 1, tzinfo=UTC)
    trend = [
        {"run": 4, "kind": "full", "verdict": "clean", "started_at": started,
         "finished_at": started + timedelta(seconds=3), "rows": 5, "findings": 0, "lag": 0}
    ]  # fmt: skip
    page = render_page(result(), trend)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "public.&lt;orders&gt;" in page
    assert re.findall(r"(?:src|href)=|url\(|@import", page) == []
    assert "the topic gone does not exist" in page
    assert "the log is &lt;long&gt;" in page
    assert page.count("<svg") == 3


def test_the_document_names_blame_and_exit_code():
    document = to_json(result())
    assert (document["exit_code"], document["verdict"]) == (1, "findings")
    (finding,) = document["findings"]
    assert (finding["kind"], finding["blame"]) == ("row missing", "database")
    assert "repair" in finding["remedy"]


def test_metrics():
    text = metrics_text(result())
    assert 'oncebox_reconcile_findings{kind="row missing",relay="shop"} 2.0' in text
    assert 'oncebox_reconcile_findings{kind="row extra",relay="shop"} 0.0' in text
    assert 'oncebox_reconcile_verdict{relay="shop"} 1.0' in text


def test_what_fails_inside_spark_is_told_in_one_sentence():
    from pyspark.errors import PySparkException

    told = str(translated(PySparkException("Job aborted\n\tat org.apache\nCaused by: java.io.IOException: no leader")))
    assert "no leader" in told
    assert "\n" not in told
    assert "nothing is concluded" in told


def test_an_audit_without_anything(monkeypatch: pytest.MonkeyPatch):
    assert "committed 0" in render({"hours": 24, "committed": 0, "aborted_by_cause": {}, "open": []})
    # A topic that is not there (a name that was mistyped) is not one without transactions.
    given: Any = {"kafka": {"bootstrap_servers": "localhost:1"}, "postgres": {"dsn": "postgresql://"}}
    settings = ReconcileSettings(**given, feed_topic="coommits")
    there = {partition: PartitionFacts(topic_id="a", log_start=0, stable=0, high=0) for partition in range(2)}
    monkeypatch.setattr(audit, "read_facts", lambda *_: {settings.log_topic: there})
    unused: Any = None
    with pytest.raises(CannotCheckError, match="the feed coommits does not exist"):
        audit._audit(unused, settings, 24)


def test_a_column_has_a_default_origin():
    assert Column(name="a", type=ColumnType(name="text", kind=Kind.TEXT)).origin == "value"
