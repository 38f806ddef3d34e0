"""The relay's file: what is wrong is told with its line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from oncebox.settings import SettingsError, load
from relay.config import RelaySettings
from relay.types import TableName

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """\
name: orders
kafka: {bootstrap_servers: "localhost:9092"}
postgres: {dsn: "${RELAY_TEST_DSN}"}
tables:
"""
GOOD = """\
  - topic: shop.orders
    table: sales.{topic}
    key: id
    columns:
      id: bigint
      city: {type: text, path: address.city}
"""


def two(first: str, second: str) -> str:
    """Two topics that go into one table."""
    return f"  - {{topic: a, table: t, {first}}}\n  - {{topic: b, table: t, {second}}}\n"


def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> RelaySettings:
    monkeypatch.setenv("RELAY_TEST_DSN", "postgresql://secret@db/x")
    file = tmp_path / "relay.yaml"
    file.write_text(text)
    return load(RelaySettings, file=file)


def test_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(tmp_path, monkeypatch, HEAD + GOOD)
    (table,) = settings.tables
    assert settings.postgres.dsn.get_secret_value() == "postgresql://secret@db/x"
    assert table.target() == TableName(schema="sales", name="shop.orders")
    assert table.key == ("id",)
    assert table.columns["id"].type == "bigint"
    assert settings.mode == "transaction"
    assert settings.topics == ["shop.orders"]


def test_two_topics_go_into_one_table_in_the_order_of_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read(tmp_path, monkeypatch, HEAD + two("key: c, ordering: x", "key: c, ordering: x"))
    assert [(table.topic, table.ordering) for table in settings.tables] == [("a", "x"), ("b", "x")]


def test_where_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in [
        ("latest", "latest"),
        ("2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("{shop.orders: {0: 17, 1: 0}}", {"shop.orders": {0: 17, 1: 0}}),
    ]:
        assert read(tmp_path, monkeypatch, f"{HEAD}{GOOD}start: {text}\n").start == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + GOOD + "start: {other: {0: 1}}\n", r"start names other, which no table takes"),
        (HEAD + GOOD + "start: {shop.orders: {0: -1}}\n", r"line 11: start"),
        (HEAD + GOOD.replace("key: id", "keys: id"), r"line 7: tables\.0\.keys is unknown; did you mean key\?"),
        (HEAD + GOOD.replace("bigint", "{typ: bigint}"), r"line 9: .*typ is unknown"),
        (HEAD + "  - topic: orders\n", r"line 5: .*an upsert needs `key`"),
        (HEAD + "  - {topic: orders, key: [a], columns: {b: text}}\n", r"line 5: .*'a' is not among"),
        (HEAD + f"  - {{topic: orders, table: {'x' * 64}, key: a}}\n", r"line 5: .*63 bytes"),
        (HEAD + "  - {topic: orders, table: a.b.c, key: a}\n", r"line 5: .*table or schema.table"),
        (HEAD + "  - {topic: orders, key: oncebox_offset}\n", r"line 5: .*version guard's own"),
        (HEAD + "  - {topic: 'or/ders', key: a}\n", r"line 5: tables\.0\.topic"),
        (HEAD + "  - {topic: a, table: t, key: a}\n  - {topic: b, table: t, key: a}\n", r"is fed by a too"),
        (
            HEAD + two("key: c, ordering: x", "key: c"),
            r"tables\.1: .*is fed by a too, .*: name an `ordering` column for both",
        ),
        (
            HEAD + two("key: c, ordering: x", "key: c, ordering: y"),
            r"tables\.1: .*has another `ordering` or `key` for a",
        ),
        (
            HEAD + two("key: c, ordering: x", "key: [c, d], ordering: x"),
            r"tables\.1: .*has another `ordering` or `key` for a",
        ),
        (HEAD + "  - {topic: a, key: a, ordering: b, guard: false}\n", r"line 5: .*`ordering` is for upserts with"),
        (HEAD + "  - {topic: a, insert_mode: insert, ordering: b}\n", r"line 5: .*`ordering` is for upserts with"),
        (HEAD + "  - {topic: a, key: a, ordering: b, columns: {a: int}}\n", r"line 5: .*'b' is not among `columns`"),
        (HEAD + "  - {topic: a, key: oncebox_ordering}\n", r"line 5: .*version guard's own"),
        (HEAD + GOOD + "on_error: ignore\n", r"line 11: on_error = 'ignore'"),
        (HEAD.replace("RELAY_TEST_DSN", "NOT_SET_AT_ALL") + GOOD, r"line 3: .*NOT_SET_AT_ALL is not set"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told) as error:
        read(tmp_path, monkeypatch, text)
    assert "secret" not in str(error.value)
