"""What one batch does to real tables: types, the version guard, deletes, refusals."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import relay.sink
from oncebox.wire import TopicPartition
from relay.plan import StopError, Unit, make_plan
from relay.queries import query
from relay.schema_changes import change_table
from relay.sink import _Guess
from relay.types import RelayError, SchemaChangeError, TableChangedError
from tests.integration.relay.conftest import Bench, record

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeBench = Callable[..., Bench]

GUARD = "oncebox_source integer, oncebox_offset bigint"
ORDERS = f"CREATE TABLE orders (id bigint PRIMARY KEY, state text, {GUARD})"
ORDERS_SECTION: dict[str, Any] = {"topic": "orders", "table": "orders", "key": ["id"]}


def state(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.rows("SELECT id, state FROM orders ORDER BY id")


def test_values_keep_what_they_are(bench: MakeBench) -> None:
    ddl = f"""
        CREATE TYPE mood AS ENUM ('good', 'bad');
        CREATE TABLE orders (id uuid PRIMARY KEY, small smallint, medium integer, large bigint, amount numeric(30, 10),
            free numeric, r real, d double precision, yes boolean, t text, v varchar(5), c char(3), at timestamptz,
            local timestamp, day date, doc jsonb, doc2 json, raw bytea, tags text[], numbers integer[], m mood,
            span interval, address inet, {GUARD})"""
    value = rb"""{"id": "6f1e2a34-0000-4000-8000-00000000000a", "small": -32768, "medium": 2147483647,
        "large": -9223372036854775808, "amount": 12345678901234567890.0123456789, "free": 1e-30, "r": 1.5, "d": 1e300,
        "yes": true, "t": "\u00fc \ud83d\ude00 \" \\ \t", "v": "abcde", "c": "ab",
        "at": "2024-02-29T23:59:59.999999+02:00", "local": "2024-01-01T00:00:00", "day": "0001-01-01",
        "doc": {"n": 0.12345678901234567890123, "a": [null, 1]}, "doc2": {"b":1 ,"a":2}, "raw": "AP8=",
        "tags": ["a,b", "\"", null, ""], "numbers": [1, null, -3], "m": "bad", "span": "1 day 02:00",
        "address": "10.0.0.1"}"""
    made = bench(ddl, [ORDERS_SECTION])
    made.apply(record(0, value))
    assert made.rows(
        "SELECT small, medium, large, amount::text, free::text, r, d, yes, t, v, c, at::text, local::text, day::text, "
        "doc::text, doc2::text, raw, tags, numbers, m::text, span::text, address::text FROM orders"
    ) == [
        (
            -32768,
            2147483647,
            -9223372036854775808,
            "12345678901234567890.0123456789",
            "0." + "0" * 29 + "1",
            1.5,
            1e300,
            True,
            'ü 😀 " \\ \t',
            "abcde",
            "ab ",
            "2024-02-29 21:59:59.999999+00",
            "2024-01-01 00:00:00",
            "0001-01-01",
            '{"a": [null, 1], "n": 0.12345678901234567890123}',
            '{"b":1 ,"a":2}',
            b"\x00\xff",
            ["a,b", '"', None, ""],
            [1, None, -3],
            "bad",
            "1 day 02:00:00",
            "10.0.0.1/32",
        )
    ]
    made.apply(record(1, b'{"id": "6f1e2a34-0000-4000-8000-00000000000a"}'))
    assert made.rows("SELECT count(*) FROM orders WHERE num_nulls(small, doc, doc2, tags, m, span) = 6") == [(1,)]


@pytest.mark.parametrize("records", [1, 2])  # the first is copied straight in, the second is staged
def test_text_is_what_it_was_whatever_encoding_the_environment_asks_for(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "WIN1252")
    made = bench(f"CREATE TABLE orders (id bigint PRIMARY KEY, state text, doc jsonb, {GUARD})", [ORDERS_SECTION])
    for at in range(records):
        made.apply(record(at, '{"id": 1, "state": "ü😀", "doc": {"ä": "€"}}'.encode()))
    assert made.rows("SELECT octet_length(state), doc = jsonb_build_object(chr(228), chr(8364)) FROM orders") == [
        (6, True)
    ]


def test_the_sessions_settings_change_neither_rows_nor_what_is_remembered_of_deletes(
    bench: MakeBench, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddl = f"CREATE TABLE orders (at timestamptz, id bytea, state text, span tstzrange, {GUARD}, PRIMARY KEY (at, id))"
    section = {"topic": "orders", "table": "orders", "key": ["at", "id"]}
    key = b'{"at": "2026-01-02T12:00:00Z", "id": "/wA="}'
    monkeypatch.setenv("PGOPTIONS", "-c timezone=Asia/Tokyo -c bytea_output=escape")
    before = bench(ddl, [section])
    before.apply(record(1, None, key=key))
    # Another process, elsewhere, reads again.
    monkeypatch.setenv("PGOPTIONS", "-c timezone=America/New_York -c bytea_output=hex")
    after = bench("SELECT", [section])
    after.high[after.sources["orders", 0]] = 2
    value = key[:-1] + b', "span": "[2026-01-02 00:00,)"}'
    after.apply(record(0, value))
    assert after.rows("SELECT * FROM orders") == [], "not resurrected"
    after.apply(record(2, value))
    with psycopg.connect(database, options="-c timezone=UTC") as connection:
        found = connection.execute("SELECT span::text FROM orders").fetchall()
    assert found == [('["2026-01-02 00:00:00+00",)',)]


@pytest.mark.parametrize("records", [1, 2])  # the first is copied straight in, the second is staged
def test_arrays_of_times_are_arrays(bench: MakeBench, records: int) -> None:
    made = bench(
        f"CREATE TABLE orders (id bigint PRIMARY KEY, at timestamp(3)[], zoned timestamptz[], days date[], {GUARD})",
        [ORDERS_SECTION],
    )
    value = (
        b'{"id": 1, "at": ["2026-01-02T03:04:05.678", null], "zoned": ["2026-01-02T03:04:05+01:00"], '
        b'"days": ["2026-01-02"]}'
    )
    for at in range(records):
        made.apply(record(at, value))
    assert made.rows("SELECT at::text, zoned::text, days::text FROM orders") == [
        ('{"2026-01-02 03:04:05.678",NULL}', '{"2026-01-02 02:04:05+00"}', "{2026-01-02}")
    ]


@pytest.mark.parametrize(
    ("of_type", "fits", "too_long"),
    [
        ("varchar(3)[]", '["abc"]', '["abc", "abcd"]'),
        ("char(3)[]", '["abc"]', '["abcd"]'),
        ("bit(3)[]", '["101"]', '["1011"]'),
        ("bit(3)", '"101"', '"1011"'),
        ("bit varying(3)", '"101"', '"1011"'),
        ("code", '"abc"', '"abcd"'),
        ("upper_code", '"ABC"', '"ABCD"'),
        ("upper_code", '"ABC"', '"abc"'),
    ],
)
def test_what_is_too_long_is_an_error_and_not_cut(bench: MakeBench, of_type: str, fits: str, too_long: str) -> None:
    domains = "CREATE DOMAIN code AS varchar(3); CREATE DOMAIN upper_code AS code CHECK (VALUE = upper(VALUE));"
    made = bench(f"{domains} CREATE TABLE orders (id bigint PRIMARY KEY, v {of_type}, {GUARD})", [ORDERS_SECTION])
    made.apply(record(0, f'{{"id": 1, "v": {fits}}}'.encode()))
    assert made.rows("SELECT to_jsonb(v)::text FROM orders") == [(fits,)]
    with pytest.raises(StopError, match="orders partition 0 offset 1"):
        made.apply(record(1, f'{{"id": 2, "v": {too_long}}}'.encode()))


def test_a_type_may_have_any_name(bench: MakeBench) -> None:
    ddl = f"""CREATE TYPE "o{{0}}d}}d" AS ENUM ('a');
        CREATE DOMAIN timestamp_ms AS bigint;
        CREATE TABLE orders (
            id bigint PRIMARY KEY, state "o{{0}}d}}d", all_of_it "o{{0}}d}}d"[], at timestamp_ms, {GUARD})"""
    made = bench(ddl, [ORDERS_SECTION])
    made.apply(record(0, b'{"id": 1, "state": "a", "all_of_it": ["a"], "at": 1700000000000}'))
    assert made.rows("SELECT state, all_of_it::text, at FROM orders") == [("a", "{a}", 1_700_000_000_000)]


def test_a_padded_key_is_the_key_without_its_blanks(bench: MakeBench) -> None:
    made = bench(f"CREATE TABLE orders (id char(3) PRIMARY KEY, state text, {GUARD})", [ORDERS_SECTION])
    for at in range(2):  # the first is copied straight in, the second is staged
        made.apply(record(2 * at, b'{"id": "ab", "state": "x"}'), record(2 * at + 1, b'{"id": "abc", "state": "x"}'))
    made.apply(record(4, b'{"id": "ab ", "state": "y"}'))
    assert state(made) == [("ab ", "y"), ("abc", "x")]
    made.apply(record(5, None, key=b"ab "), record(6, None, key=b"abcd"))
    assert state(made) == [("abc", "x")]
    made.apply(record(4, b'{"id": "ab", "state": "y"}'))
    assert state(made) == [("abc", "x")], "not resurrected"
    with pytest.raises(StopError, match="too long"):
        made.apply(record(7, b'{"id": "abcd", "state": "z"}'))


@pytest.mark.parametrize("of_type", ["varchar(3)", "char(3)"])
def test_a_delete_of_what_can_be_no_key_is_not_remembered_as_that_of_another_row(
    bench: MakeBench, of_type: str
) -> None:
    made = bench(f"CREATE TABLE orders (id {of_type} PRIMARY KEY, state text, {GUARD})", [ORDERS_SECTION])
    made.apply(record(6, None, key=b"abcd"), record(7, None, key=b"xy"))
    made.apply(record(4, b'{"id": "abc", "state": "x"}'), record(5, b'{"id": "xy", "state": "x"}'))
    assert state(made) == [("abc", "x")]


def test_of_several_records_of_one_row_the_last_is_written(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION])
    made.apply(
        record(0, b'{"id": 1, "state": "a"}'),
        record(1, b'{"id": 2, "state": "a"}'),
        record(2, b'{"id": 1, "state": "b"}'),
        record(3, None, key=b"2"),
        record(4, b'{"id": 3, "state": "c"}'),
        record(5, None, key=b'{"id": 3}'),
        record(6, b'{"id": 3, "state": "d"}'),
    )
    assert state(made) == [(1, "b"), (3, "d")]


def test_an_older_record_of_the_same_partition_changes_nothing(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION])
    made.apply(record(5, b'{"id": 1, "state": "new"}'), record(6, None, key=b"2"))
    made.apply(record(3, b'{"id": 1, "state": "old"}'), record(4, b'{"id": 2, "state": "old"}'))
    assert state(made) == [(1, "new")], "neither overwritten nor resurrected"
    made.apply(record(4, None, key=b"1"))
    assert state(made) == [(1, "new")], "nor deleted"
    made.apply(record(7, b'{"id": 2, "state": "again"}'))
    assert state(made) == [(1, "new"), (2, "again")]


def test_a_row_that_moved_to_another_partition_stays_there_in_a_replay(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION])
    history = [
        record(0, b'{"id": 1, "state": "p0"}'),
        record(0, b'{"id": 1, "state": "p1"}', partition=1),
        record(0, None, key=b"2", partition=2),
        record(1, b'{"id": 2, "state": "p0"}'),
        record(2, b'{"id": 3, "state": "p0"}'),
        record(1, None, key=b"3", partition=1),
    ]
    for each in history:
        made.apply(each)
    expected = [(1, "p1"), (2, "p0")]
    assert state(made) == expected
    made.apply(*reversed(history))
    made.apply(*history)
    for each in history:
        made.apply(each)
    assert state(made) == expected
    made.apply(record(9, b'{"id": 1, "state": "p0 again"}'), *history)
    assert state(made) == [(1, "p0 again"), (2, "p0")], "what is new wins, wherever it stands in a replayed batch"


def test_a_row_that_moves_inside_of_a_batch_is_remembered(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION])
    history = [record(7, b'{"id": 1, "state": "p0"}'), record(3, b'{"id": 1, "state": "p1"}', partition=1)]
    made.apply(*history)
    assert state(made) == [(1, "p1")]
    made.apply(history[0])
    assert state(made) == [(1, "p1")]


def test_rows_that_were_there_before_are_taken_over(bench: MakeBench) -> None:
    made = bench(f"{ORDERS}; INSERT INTO orders VALUES (1, 'by hand'), (2, 'by hand')", [ORDERS_SECTION])
    made.apply(record(0, b'{"id": 1, "state": "a"}'), record(1, None, key=b"2"))
    assert state(made) == [(1, "a")]


@pytest.mark.parametrize("guard", [True, False])
def test_new_rows_and_known_ones_in_any_turn(bench: MakeBench, *, guard: bool) -> None:
    """New rows go straight into the table; with a known one among them, all go the other way."""
    made = bench(ORDERS, [ORDERS_SECTION | {"guard": guard}])
    expected: dict[int, str] = {}
    for offset, rows in enumerate([{1: "a", 2: "a"}, {2: "b", 3: "b"}, {4: "c"}, {5: "d", 4: "d"}, {6: "e"}, {7: "f"}]):
        made.apply(
            *(
                record(10 * offset + row, b'{"id": %d, "state": "%s"}' % (row, each.encode()))
                for row, each in rows.items()
            )
        )
        expected |= rows
        assert state(made) == sorted(expected.items())
    marks = made.rows("SELECT oncebox_source IS NOT NULL AND oncebox_offset % 10 = id FROM orders")
    assert marks == [(guard,)] * 7


def test_a_key_that_is_unique_no_more_stops_it(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION])
    made.apply(record(0, b'{"id": 1, "state": "a"}'))
    with psycopg.connect(made.settings.postgres.dsn.get_secret_value(), autocommit=True) as other:
        other.execute("ALTER TABLE orders DROP CONSTRAINT orders_pkey")
    with pytest.raises(RelayError, match="no unique or exclusion constraint"):
        made.apply(record(1, b'{"id": 1, "state": "b"}'))
    assert state(made) == [(1, "a")]


def test_tables_into_which_copy_would_do_something_else(bench: MakeBench) -> None:
    made = bench(
        f"""{ORDERS}; CREATE TABLE ruled (id bigint); CREATE RULE r AS ON INSERT TO ruled DO ALSO NOTIFY x;
        CREATE VIEW seen AS SELECT * FROM orders; CREATE TABLE numbered (id bigint GENERATED ALWAYS AS IDENTITY);
        CREATE TABLE policed (id bigint); ALTER TABLE policed ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
        CREATE ROLE nobody_special; GRANT USAGE ON SCHEMA public TO nobody_special""",
        [ORDERS_SECTION],
    )
    with made.connection.transaction(force_rollback=True):
        made.connection.execute("SET LOCAL ROLE nobody_special")
        names = ["orders", "ruled", "seen", "numbered", "policed"]
        assert made.connection.execute(query("plain_tables"), {"tables": names}).fetchall() == [("orders",)]
    made.connection.execute("DROP OWNED BY nobody_special; DROP ROLE nobody_special")


@pytest.mark.parametrize("new_type", ["numeric", "double precision"])
@pytest.mark.parametrize("is_upsert", [True, False], ids=["upsert", "insert"])
def test_a_column_that_was_altered_is_never_filled_with_what_it_was(
    bench: MakeBench, new_type: str, *, is_upsert: bool
) -> None:
    """Of the new type the bytes of the old one mean something else: a bigint's are 0 as a numeric, or are refused."""
    section = ORDERS_SECTION if is_upsert else {"topic": "orders", "table": "orders", "insert_mode": "insert"}
    made = bench(f"CREATE TABLE orders (id bigint PRIMARY KEY, size bigint, {GUARD})", [section], on_error="park")
    made.apply(record(0, b'{"id": 1, "size": 5}'))
    dsn = made.settings.postgres.dsn.get_secret_value()
    rows = [record(offset, b'{"id": %d, "size": %d}' % (offset + 1, 10**offset)) for offset in range(1, 9)]
    # Also where the transaction sees the catalogue as it was before.
    made.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with made.connection.transaction():
        assert made.rows("SELECT 1") == [(1,)]
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute(f"ALTER TABLE orders ALTER size TYPE {new_type}")
        with pytest.raises(TableChangedError, match="was altered"):
            made.apply(*rows)
    with pytest.raises(TableChangedError):
        made.apply(*rows)
    again = bench("SELECT 1", [section], on_error="park")
    again.apply(*rows)
    assert made.rows("SELECT size::numeric::bigint FROM orders ORDER BY id") == [
        (5,),
        *((10**power,) for power in range(1, 9)),
    ]
    assert made.rows("SELECT count(*) FROM oncebox.dead_letter") == [(0,)]


def test_guard_columns_of_other_types_are_cast(bench: MakeBench) -> None:
    made = bench(f"{ORDERS}; ALTER TABLE orders ALTER oncebox_offset TYPE numeric", [ORDERS_SECTION])
    for offset in range(3):
        made.apply(record(offset, b'{"id": %d, "state": "a"}' % offset))
    assert made.rows("SELECT oncebox_offset::text FROM orders ORDER BY id") == [("0",), ("1",), ("2",)]


def test_a_wrong_guess_is_made_ever_more_seldom() -> None:
    guess = _Guess(is_possible=True)
    made: list[int] = []
    for batch in range(20):
        if guess.is_new():
            made.append(batch)
            guess.was(right=False)
    assert made == [0, 2, 5, 10, 19]
    guess.was(right=True)
    assert guess.is_new()
    assert guess.is_new()
    assert not _Guess(is_possible=False).is_new()


def test_without_a_guard_the_last_to_come_wins(bench: MakeBench) -> None:
    made = bench("CREATE TABLE orders (id bigint PRIMARY KEY, state text)", [ORDERS_SECTION | {"guard": False}])
    made.apply(record(5, b'{"id": 1, "state": "a"}'), record(6, b'{"id": 2, "state": "a"}'))
    made.apply(record(3, b'{"id": 1, "state": "b"}'), record(7, None, key=b"2"))
    assert state(made) == [(1, "b")]


def test_inserts_take_every_record(bench: MakeBench) -> None:
    section = {
        "topic": "orders",
        "table": "log",
        "insert_mode": "insert",
        "columns": {"id": {}, "at": {"path": "@offset"}, "who": {"path": "@key"}},
    }
    made = bench(f"CREATE TABLE log (id bigint, at bigint, who text, {GUARD})", [section])
    made.apply(record(0, b'{"id": 1}', key=b"x"), record(1, b'{"id": 1, "other": []}'))
    assert made.rows("SELECT id, at, who FROM log ORDER BY at") == [(1, 0, "x"), (1, 1, None)]


def test_composite_keys_paths_and_two_tables_of_one_topic(bench: MakeBench) -> None:
    ddl = f"""
        CREATE TABLE orders (shop text, id int, city text, PRIMARY KEY (shop, id), {GUARD});
        CREATE TABLE shops (shop text PRIMARY KEY, {GUARD})"""
    columns = {"shop": {"path": "shop.name"}, "id": {}, "city": {"path": "to.address.city"}}
    sections = [
        {"topic": "orders", "table": "orders", "key": ["shop", "id"], "columns": columns},
        {
            "topic": "orders",
            "table": "shops",
            "key": "shop",
            "columns": {"shop": {"path": "shop.name"}},
            "delete_on_tombstone": False,
        },
    ]
    made = bench(ddl, sections)
    made.apply(
        record(0, b'{"shop": {"name": "a"}, "id": 1, "to": {"address": {"city": "x"}}}'),
        record(1, b'{"shop": {"name": "a"}, "id": 2, "to": null}'),
        record(2, None, key=b'{"name": "a", "id": 1}'),
    )
    assert made.rows("SELECT shop, id, city FROM orders") == [("a", 2, None)]
    assert made.rows("SELECT shop FROM shops") == [("a",)]


def test_debezium_envelopes(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION | {"format": "debezium"}])
    made.apply(
        record(0, b'{"op": "c", "before": null, "after": {"id": 1, "state": "a"}, "source": {"lsn": 1}}'),
        record(1, b'{"schema": {}, "payload": {"op": "r", "after": {"id": 2, "state": "a"}}}'),
        record(2, b'{"op": "u", "before": {"id": 1, "state": null}, "after": {"id": 1, "state": "b"}}'),
        record(3, b'{"op": "d", "before": {"id": 2, "state": null}, "after": null}'),
        record(4, None, key=b'{"schema": {}, "payload": {"id": 2}}'),
        record(5, b'{"op": "m"}'),
    )
    assert state(made) == [(1, "b")]


def test_foreign_keys_inside_of_a_batch_need_no_order(bench: MakeBench) -> None:
    ddl = f"""{ORDERS};
        CREATE TABLE items (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders, {GUARD})"""
    made = bench(ddl, [{"topic": "items", "table": "items", "key": ["id"]}, ORDERS_SECTION])
    made.apply(record(0, b'{"id": 1, "order_id": 7}', topic="items"), record(0, b'{"id": 7, "state": "a"}'))
    assert made.rows("SELECT id, order_id FROM items") == [(1, 7)]
    made.apply(record(1, None, key=b"7"), record(1, None, key=b"1", topic="items"))
    assert made.rows("SELECT count(*) FROM items") == made.rows("SELECT count(*) FROM orders") == [(0,)]


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("bad", [b'{"id": 2, "order_id": 8}', b'{"id": 2, "order_id": 7, "size": "too long"}'])
def test_a_row_whose_reference_comes_later_is_not_blamed_for_another(bench: MakeBench, bad: bytes, at: int) -> None:
    ddl = f"""{ORDERS}; CREATE TABLE items
        (id bigint PRIMARY KEY, order_id bigint NOT NULL REFERENCES orders, size varchar(3), {GUARD})"""
    made = bench(ddl, [{"topic": "items", "table": "items", "key": ["id"]}, ORDERS_SECTION], on_error="skip")
    units = [record(0, b'{"id": 1, "order_id": 7}', topic="items"), record(0, b'{"id": 7, "state": "a"}')]
    units.insert(at, record(1, bad, topic="items"))
    made.apply(*units)
    assert made.rows("SELECT id, order_id FROM items") == [(1, 7)]
    assert made.rows("SELECT value, state FROM oncebox.dead_letter") == [(bad, "skipped")]


@pytest.mark.parametrize("action", ["NO ACTION", "RESTRICT"])
def test_a_row_that_is_referred_to_goes_after_what_refers_to_it(bench: MakeBench, action: str) -> None:
    """PostgreSQL 18 has another error for RESTRICT."""
    ddl = f"""CREATE TABLE items (id bigint PRIMARY KEY, {GUARD}); CREATE TABLE orders
        (id bigint PRIMARY KEY, item bigint NOT NULL REFERENCES items ON DELETE {action}, {GUARD})"""
    made = bench(ddl, [{"topic": "items", "table": "items", "key": ["id"]}, ORDERS_SECTION], on_error="park")
    made.apply(record(0, b'{"id": 7}', topic="items"), record(0, b'{"id": 1, "item": 7}'))
    item_goes, order_goes = record(1, None, key=b'{"id": 7}', topic="items"), record(1, None, key=b'{"id": 1}')
    done = made.apply(item_goes, order_goes, record(2, b'{"id": 2, "item": 9}'))
    assert [(letter.record.topic, letter.record.offset) for letter in done.letters] == [("orders", 2)]
    assert made.rows("SELECT (SELECT count(*) FROM items), (SELECT count(*) FROM orders)") == [(0, 0)]


def test_a_deferred_reference_from_a_table_that_is_not_ours_is_judged(bench: MakeBench) -> None:
    """PostgreSQL would ask for it only at the commit, where nobody can tell any more what is to blame."""
    ddl = f"{ORDERS}; CREATE TABLE notes (about bigint REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"
    made = bench(ddl, [ORDERS_SECTION], on_error="park")
    made.apply(record(0, b'{"id": 1, "state": "new"}'))
    made.connection.execute("INSERT INTO notes VALUES (1)")
    done = made.apply(record(1, None, key=b'{"id": 1}'), record(2, b'{"id": 2, "state": "new"}'))
    assert [(letter.record.offset, letter.state) for letter in done.letters] == [(1, "parked")]
    assert state(made) == [(1, "new"), (2, "new")]


def test_a_unique_value_may_move_from_one_row_to_another(bench: MakeBench) -> None:
    made = bench(f"CREATE TABLE orders (id bigint PRIMARY KEY, state text UNIQUE, {GUARD})", [ORDERS_SECTION])
    made.apply(record(0, b'{"id": 1, "state": "x"}'))
    move = [record(1, None, key=b"1"), record(2, b'{"id": 2, "state": "x"}')]
    made.apply(*move)
    assert state(made) == [(2, "x")]
    made.apply(Unit([record(3, None, key=b"2"), record(4, b'{"id": 3, "state": "x"}')], "id", 1))
    assert state(made) == [(3, "x")]


BAD = {
    "truncated": (rb'{"id": 1', "truncated"),
    "no object": (b"[]", "Expected `object`"),
    "not UTF-8": (b'{"id": 1, "state": "\xff"}', "utf-8"),
    "no key": (b'{"state": "a"}', "key column 'id' has no value"),
    "wrong type": (b'{"id": "a"}', "Expected `int"),
    "out of range": (b'{"id": 9223372036854775808}', "column 'id' (bigint): the number is out of range"),
    "NUL": (rb'{"id": 1, "state": "\u0000"}', "NUL"),
    "unknown field": (b'{"id": 1, "size": 3}', "unknown field `size`"),
    "constraint": (b'{"id": 1, "state": "never"}', "violates check constraint"),
    "NUL in a field's name": (rb'{"id": 1, "st\u0000ate": 1}', "unknown field"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_stops_is_parked_or_is_skipped(bench: MakeBench, name: str) -> None:
    value, error = BAD[name]
    ddl = f"CREATE TABLE orders (id bigint PRIMARY KEY, state text CHECK (state <> 'never'), {GUARD})"
    batch = [
        record(0, b'{"id": 1, "state": "before"}', key=b"1"),
        record(1, value, key=b"1"),
        record(2, b'{"id": 2, "state": "other"}', key=b"2"),
        record(3, b'{"id": 1, "state": "after"}', key=b"1"),
    ]
    made = bench(ddl, [ORDERS_SECTION])
    # (What the database refuses is not even noticed where a later record of the batch replaces it: so not batch[3].)
    with pytest.raises(StopError, match="orders partition 0 offset 1: ") as stopped:
        made.apply(*batch[:3])
    assert error.lower() in str(stopped.value).lower()
    assert state(made) == []
    assert made.rows("SELECT * FROM oncebox.dead_letter") == []

    parking = Bench(made.settings.postgres.dsn.get_secret_value(), [ORDERS_SECTION], on_error="park")
    parking.apply(*batch[:3])
    parking.apply(batch[3])
    assert state(parking) == [(1, "before"), (2, "other")]
    assert parking.rows("SELECT record_offset, state, value, id = unit FROM oncebox.dead_letter ORDER BY id") == [
        (1, "parked", value, True),
        (3, "held", batch[3].value, True),
    ]
    parking.apply(record(4, b'{"id": 1, "state": "later"}', key=b"1"), record(5, None, key=b"2"))
    assert state(parking) == [(1, "before")], "held behind it in the next batch too"
    parking.connection.close()

    skipping = Bench(made.settings.postgres.dsn.get_secret_value(), [ORDERS_SECTION], on_error="skip")
    skipping.apply(record(10, value, key=b"1"), record(11, b'{"id": 2, "state": "after"}', key=b"2"))
    skipping.apply(record(12, b'{"id": 1, "state": "after"}', key=b"1"))
    assert state(skipping) == [(1, "after"), (2, "after")]
    assert skipping.rows("SELECT record_offset FROM oncebox.dead_letter WHERE state = 'skipped'") == [(10,)]
    skipping.connection.close()


@pytest.mark.parametrize(
    "refuse", ["RAISE EXCEPTION 'never' USING ERRCODE = 'APP01'", "CASE NEW.state WHEN 'other' THEN NULL; END CASE"]
)
def test_what_a_trigger_refuses_in_its_own_way_is_a_bad_record(bench: MakeBench, refuse: str) -> None:
    ddl = f"""{ORDERS};
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF NEW.state = 'never' THEN {refuse}; END IF; RETURN NEW; END $$;
        CREATE TRIGGER look BEFORE INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION look()"""
    made = bench(ddl, [ORDERS_SECTION], on_error="park")
    made.apply(record(0, b'{"id": 1, "state": "x"}'), record(1, b'{"id": 2, "state": "never"}'))
    assert state(made) == [(1, "x")]
    assert made.rows("SELECT record_offset, state FROM oncebox.dead_letter") == [(1, "parked")]


POISON = {
    "NUL in the key": record(1, b"{}", key=b"a\x00b"),
    "NUL in the key's document": record(1, b"{}", key=rb'{"id": "a\u0000b"}'),
    "NUL in the key of a delete": record(1, None, key=b"a\x00b"),
    "NUL in a header": record(1, b"{", key=b"1")._replace(headers=[("a\x00b", b"x"), ("c", None)]),
    "a time after the year 9999": record(1, b"{", key=b"1")._replace(timestamp_ms=1 << 60),
    "a time before 1970": record(1, b"{", key=b"1")._replace(timestamp_ms=-(1 << 60)),
    "nested too deep": record(1, b'{"amount": 1, "more": ' + b"[" * 5000 + b"]" * 5000 + b"}", key=b"1"),
    "a number that is none": record(1, b'{"amount": "sNaN"}', key=b"1"),
}


@pytest.mark.parametrize("name", POISON)
def test_whatever_a_record_holds_it_can_be_parked(bench: MakeBench, name: str) -> None:
    section = {
        "topic": "orders",
        "table": "orders",
        "key": ["id", "amount"],
        "columns": {"id": {"path": "@key"}, "amount": {}},
    }
    ddl = f"CREATE TABLE orders (id text, amount numeric DEFAULT 0, PRIMARY KEY (id, amount), {GUARD})"
    made = bench(ddl, [section], on_error="park")
    made.apply(record(0, b'{"amount": 1}', key=b"0"), POISON[name], record(2, b'{"amount": 1}', key=b"2"))
    assert made.rows("SELECT id FROM orders ORDER BY id") == [("0",), ("2",)]
    assert made.rows("SELECT record_offset, state, key FROM oncebox.dead_letter") == [(1, "parked", POISON[name].key)]
    made.apply(POISON[name]._replace(offset=3))
    assert made.rows("SELECT state FROM oncebox.dead_letter ORDER BY id") == [("parked",), ("held",)]


def test_what_cannot_be_saved_beside_the_rows_stops_with_its_place(bench: MakeBench) -> None:
    """Trying again would fail in the same way for ever."""
    made = bench(ORDERS, [ORDERS_SECTION])
    units = [Unit([record(7, b'{"id": 1, "state": "a"}')])]
    plan = make_plan(made.planner, units, frozenset())

    def divide(connection: Any, _: object) -> None:
        connection.execute("SELECT 1 / 0")

    def save_nul(connection: Any, _: object) -> None:
        connection.execute("SELECT %s::text", ["\x00"])

    for wrong in (divide, save_nul):
        with pytest.raises(RelayError, match="orders partition 0 offset 7: "):
            made.sink.apply(made.planner, units, plan, frozenset(), wrong)
    assert state(made) == []


def test_a_bad_record_takes_its_whole_transaction_along(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION], on_error="park")
    made.apply(
        Unit([record(0, b'{"id": 1, "state": "a"}'), record(1, b"bad"), record(2, b'{"id": 2, "state": "a"}')], "t", 1),
        Unit([record(3, b'{"id": 2, "state": "b"}'), record(4, b'{"id": 3, "state": "b"}')], "t", 2),
        Unit([record(5, b'{"id": 3, "state": "c"}')], "t", 3),
        Unit([record(6, b'{"id": 4, "state": "d"}')], "t", 4),
    )
    assert state(made) == [(4, "d")]
    assert made.rows("SELECT number, count(*), min(state) FROM oncebox.dead_letter GROUP BY 1 ORDER BY 1") == [
        (1, 3, "parked"),
        (2, 2, "held"),
        (3, 1, "held"),
    ]


def test_a_column_is_only_ever_widened(bench: MakeBench) -> None:
    """By who looked at the table as it is; and what PostgreSQL refuses is told, not thrown."""
    made = bench(f"{ORDERS}; ALTER TABLE orders ADD size numeric", [ORDERS_SECTION])
    table = made.settings.tables[0].target()
    types = (
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attname = "
    )
    change_table(made.connection, SchemaChangeError(table, "size", "bigint", before="integer"))
    change_table(made.connection, SchemaChangeError(table, "size", "jsonb"))
    assert made.rows(types + "'size'") == [("numeric",)], "another process was faster"
    change_table(made.connection, SchemaChangeError(table, "id", "numeric", before="bigint"))
    change_table(made.connection, SchemaChangeError(table, "more", "text"))
    assert made.rows(types + "'id'") == [("numeric",)]
    assert made.rows(types + "'more'") == [("text",)]
    made.connection.execute("CREATE VIEW seen AS SELECT size FROM orders")
    with pytest.raises(RelayError, match="needs the column 'size' as text, and PostgreSQL refuses: cannot alter type"):
        change_table(made.connection, SchemaChangeError(table, "size", "text", before="numeric"))


def test_names_are_never_sql(bench: MakeBench) -> None:
    hostile = 'a"; DROP TABLE x; --%s'
    ddl = 'CREATE TABLE "{0}" ("{0}" bigint PRIMARY KEY, "select" text, {1})'.format(hostile.replace('"', '""'), GUARD)
    section = {
        "topic": "orders",
        "table": hostile,
        "key": [hostile],
        "columns": {hostile: {"path": "id"}, "select": {"path": "@key"}},
    }
    made = bench(ddl, [section])
    made.apply(record(0, b'{"id": 1}', key=b"'; --"), record(1, None, key=b"1"), record(2, b'{"id": 2}', key=b"%s"))
    assert made.rows('SELECT * FROM "a""; DROP TABLE x; --%s"')[0][:2] == (2, "%s")


def test_a_deadlock_is_tried_again(bench: MakeBench) -> None:
    made = bench(ORDERS, [ORDERS_SECTION])
    made.apply(record(0, b'{"id": 1, "state": "a"}'), record(1, b'{"id": 2, "state": "a"}'))
    with psycopg.connect(made.settings.postgres.dsn.get_secret_value()) as other, ThreadPoolExecutor() as pool:
        # Of the two the relay is to find the deadlock, and it looks once.
        other.execute("SET deadlock_timeout = '60s'")
        made.connection.execute("SET deadlock_timeout = '5s'")
        other.execute("UPDATE orders SET state = 'by hand' WHERE id = 2")
        applied = pool.submit(made.apply, record(2, b'{"id": 1, "state": "b"}'), record(3, b'{"id": 2, "state": "b"}'))
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO%'"
        with psycopg.connect(made.settings.postgres.dsn.get_secret_value(), autocommit=True) as watching:
            while watching.execute(waiting).fetchone() != (1,):
                assert not applied.done()
        other.execute("UPDATE orders SET state = 'by hand' WHERE id = 1")
        other.commit()
        applied.result(30)
    assert state(made) == [(1, "b"), (2, "b")]


def test_a_table_that_is_gone_is_told_also_where_nothing_is_in_memory(bench: MakeBench) -> None:
    """Of a large transaction all records may wait in the database."""
    made = bench(ORDERS, [ORDERS_SECTION])
    made.connection.execute("DROP TABLE orders")
    large = Unit((), "writer", 7, {TopicPartition("orders", 0): 0})
    plan = make_plan(made.planner, [Unit([record(0, b'{"id": 1, "state": "a"}')])], frozenset())
    with pytest.raises(RelayError, match=r'relation "public\.orders" does not exist .*: mend it and start'):
        made.sink.apply_pieces([large], lambda: [plan], frozenset(), lambda *_: None)


def test_who_is_to_blame_among_many_may_take_long_to_find(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database does not end the transaction while the relay plans; afterwards it is as impatient as before."""
    monkeypatch.setattr(relay.sink, "PLANNED_AT_ONCE", 3)
    made = bench(f"{ORDERS}; ALTER TABLE orders ADD CHECK (state <> 'never')", [ORDERS_SECTION], on_error="skip")
    seen: list[int] = []

    def look() -> None:
        seen.extend(
            made.rows("SELECT setting::int FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'")[0]
        )

    units = [Unit([record(at, b'{"id": %d, "state": "%s"}' % (at, b"a" if at else b"never"))]) for at in range(50)]
    plan = make_plan(made.planner, units, frozenset())
    look()
    made.sink.apply(made.planner, units, plan, frozenset(), lambda *_: look())
    look()
    assert seen == [seen[0], seen[0] + 50 // relay.sink.PLANNED_PER_MS, seen[0]]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has this limit")
def test_a_server_that_is_gone_is_noticed_also_while_it_owes_an_answer(bench: MakeBench) -> None:
    """To keepalives alone nobody would listen then: what was sent and not acknowledged is sent again and again."""
    made = bench(ORDERS, [ORDERS_SECTION])
    with socket.socket(fileno=os.dup(made.connection.fileno())) as wire:
        assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
