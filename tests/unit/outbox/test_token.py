"""A token speaks of one database; any other is recognised at the start, never published from."""

import json
from dataclasses import replace

import pytest

from relay.outbox.lsn import lsn_number, lsn_text
from relay.outbox.token import RESYNC_BEGUN, SLOT_TAKEN, Facts, StopError, Token, check, decode, encode

TOKEN = Token(
    system_identifier="9", timeline=1, source="slot", position=100, end=108, fence=3, retried="r", database="5"
)
FACTS = Facts(
    system_identifier="9",
    timeline=1,
    source="slot",
    fence=4,
    noted_source="slot",
    noted_system_identifier="9",
    noted_timeline=1,
    noted_published=100,
    database="5",
    idle=50,
    newest=200,
    confirmed=108,
)


def test_a_token_survives_its_bytes():
    assert decode(encode(TOKEN)) == TOKEN
    assert decode(b"") is None


def test_a_token_of_an_older_relay_names_no_database():
    given = json.loads(encode(TOKEN))
    del given["database"]
    assert decode(json.dumps(given).encode()) == replace(TOKEN, database="")


@pytest.mark.parametrize(("data", "told"), [(b"offset=7", "not an outbox"), (b'{"outbox":9}', "version 9")])
def test_a_foreign_token_stops_it(data, told):
    with pytest.raises(StopError, match=told):
        decode(data)


def test_its_own_database_is_accepted():
    check(TOKEN, FACTS)
    check(None, replace(FACTS, confirmed=50, noted_published=0))
    check(replace(TOKEN, database=""), FACTS)  # as older relays wrote it
    check(TOKEN, replace(FACTS, idle=150, confirmed=150))
    check(TOKEN, replace(FACTS, confirmed=20))  # a slot that was not written to disk before a crash is repeated from
    check(TOKEN, replace(FACTS, confirmed=None))


@pytest.mark.parametrize(
    ("token", "facts", "told"),
    [
        (TOKEN, {"system_identifier": "8"}, "another database cluster"),
        (TOKEN, {"system_identifier": "8", "noted_system_identifier": "8"}, "another database cluster"),
        (TOKEN, {"timeline": 2}, "timeline 2"),
        (TOKEN, {"timeline": 2, "noted_timeline": 2}, "restored or failed over"),
        (None, {"timeline": 2}, "restored or failed over"),
        (TOKEN, {"source": "other"}, "set up to be read from 'slot'"),
        (TOKEN, {"source": "other", "noted_source": "other"}, "was read from 'slot'"),
        (TOKEN, {"noted_source": RESYNC_BEGUN}, "resync --apply"),
        (TOKEN, {"noted_source": SLOT_TAKEN}, "somebody else has read from the slot"),
        (TOKEN, {"fence": 3}, "older copy"),
        (TOKEN, {"newest": 99}, "older copy"),
        (TOKEN, {"confirmed": 109}, "beyond all"),
        (None, {"confirmed": 51, "noted_published": 0}, "beyond all"),
        (None, {"confirmed": 50}, "know of no commit"),
        (TOKEN, {"database": "6"}, "another database of the server"),
    ],
)
def test_any_other_is_told(token, facts, told):
    with pytest.raises(StopError, match=told):
        check(token, replace(FACTS, **facts))


def test_lsns_as_postgresql_writes_them():
    assert lsn_number("16/B374D848") == 0x16_B374D848
    assert lsn_text(0x16_B374D848) == "16/B374D848"
    with pytest.raises(ValueError, match="no position"):
        lsn_number("12")
