"""What ends a relay, what it waits for, and how it changes a table in between."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from relay.config import RelaySettings
from relay.service import Relay
from relay.types import FencedError, RelayError, SchemaChangeError, TableChangedError, TableName

SETTINGS = RelaySettings.model_validate(
    {
        "name": "test",
        "kafka": {"bootstrap_servers": "localhost:9092"},
        "postgres": {"dsn": "postgresql://localhost/x"},
        "tables": [{"topic": "t", "key": ["id"]}],
    }
)


def change(column: str) -> SchemaChangeError:
    return SchemaChangeError(TableName(schema="public", name="t"), column, "bigint")


class Stub(Relay):
    """Sessions and changes of tables that end as they are told, one after another; then it is told to stop."""

    def __init__(self, sessions: list[Exception], changes: list[Exception | None]) -> None:
        super().__init__(SETTINGS)
        self.sessions = iter(sessions)
        self.changes = iter(changes)
        self.changed: list[str] = []
        self.begun_at: list[float] = []

    async def _session(self) -> None:
        self.begun_at.append(asyncio.get_running_loop().time())
        error = next(self.sessions, None)
        if error is not None:
            raise error
        self.stop()

    def _change_table(self, change: SchemaChangeError) -> None:
        error = next(self.changes, None)
        if error is not None:
            raise error
        self.changed.append(change.column)


async def test_a_change_that_fails_for_a_while_is_made_later() -> None:
    relay = Stub([change("a"), change("b")], [psycopg.OperationalError("the server is gone"), None, None])
    await relay.run()
    assert relay.changed == ["a", "b"]
    assert relay.status.retries == 1


async def test_a_change_that_is_refused_stops_it_with_the_reason() -> None:
    relay = Stub([change("a")], [RelayError("a view uses the column")])
    with pytest.raises(RelayError, match="a view uses the column"):
        await relay.run()
    assert relay.status.state == "STOPPED"


async def test_a_change_that_does_not_help_is_not_made_in_a_hot_loop() -> None:
    relay = Stub([change("a")] * 3, [])
    await relay.run()
    _, second, third, fourth = relay.begun_at
    assert third - second > 0.1
    assert fourth - third > 0.2


@pytest.mark.parametrize("error", [TableChangedError("altered"), FencedError("by another")])
async def test_the_next_session_sees_what_others_have_changed(error: Exception) -> None:
    relay = Stub([error], [])
    await relay.run()
    assert len(relay.begun_at) == 2
    assert relay.status.retries == 1


@pytest.mark.parametrize(
    "error", [psycopg.errors.DatetimeFieldOverflow("x"), psycopg.DataError("NUL"), psycopg.errors.UndefinedTable("x")]
)
async def test_what_will_never_fit_is_not_tried_again(error: Exception) -> None:
    relay = Stub([error], [])
    with pytest.raises(RelayError, match="PostgreSQL refuses"):
        await relay.run()
