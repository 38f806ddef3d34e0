"""Rows become records by the rules that people know from Debezium's outbox router; a bad row says what is wrong."""

import pytest

from relay.outbox.mapping import BadRowError, Mapping, MappingSettings, row_of_message
from relay.outbox.plan import Row


def row(**fields: bytes | None) -> Row:
    usual: dict[str, bytes | None] = {
        "id": b"7",
        "aggregatetype": b"order",
        "aggregateid": b"k",
        "payload": b"{}",
        "type": None,
        "headers": None,
    }
    return Row(**usual | fields)


def test_topic_key_value_and_headers():
    given = row(type=b"OrderMade", headers=b'{"trace": "abc", "retry": 3, "none": null}')
    assert Mapping(MappingSettings()).record(given) == (
        "outbox.event.order",
        b"k",
        b"{}",
        [("id", b"7"), ("type", b"OrderMade"), ("trace", b"abc"), ("retry", b"3"), ("none", None)],
    )


def test_long_numbers_keep_their_digits():
    digits = b"12345678901234567890.12345678901234567890"
    content = b'{"id": 123456789012345678901, "payload": {"n": %b}, "headers": {"n": %b}}' % (digits, digits)
    found = row_of_message(content)
    assert found.id == b"123456789012345678901"
    assert found.payload == found.headers == b'{"n": %b}' % digits
    assert Mapping(MappingSettings(topic="t")).record(found).headers[-1] == ("n", digits)


def test_a_message_that_is_no_object_is_a_bad_row():
    for content in (b"[]", b"{", b'{"id": "\\ud800"}', b'{"id": 1, "payload": {"a": tru}}', b"\xff"):
        assert row_of_message(content) == (None, None, None, content, None, None)


def test_what_can_be_set():
    mapping = Mapping(
        MappingSettings(topic="{aggregatetype}.v1", id_header="event-id", type_header="", empty_is_tombstone=True)
    )
    assert mapping.record(row(type=b"t", payload=b"")) == ("order.v1", b"k", None, [("event-id", b"7")])
    assert mapping.record(row(aggregateid=None)).key is None
    assert Mapping(MappingSettings(topic="fixed")).record(row(aggregatetype=None)).topic == "fixed"


def test_null_is_a_tombstone_and_empty_is_not():
    mapping = Mapping(MappingSettings())
    assert mapping.record(row(payload=None)).value is None
    assert mapping.record(row(payload=b"")).value == b""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"id": None}, "no id"),
        ({"aggregatetype": None}, "no aggregatetype"),
        ({"aggregatetype": b"a b"}, "no name for a topic"),
        ({"aggregatetype": b"x" * 240}, "no name for a topic"),
        ({"aggregatetype": b"\xff"}, "not UTF-8"),
        ({"headers": b"[1]"}, "not a JSON object"),
        ({"headers": b"{"}, "not a JSON object"),
    ],
)
def test_a_bad_row_says_what_is_wrong(fields, told):
    with pytest.raises(BadRowError, match=told):
        Mapping(MappingSettings()).record(row(**fields))


def test_reserved_topics_are_refused():
    mapping = Mapping(MappingSettings(topic="{aggregatetype}"))
    for name in (b"__consumer_offsets", b"oncebox.commits"):
        with pytest.raises(BadRowError, match="reserved"):
            mapping.record(row(aggregatetype=name))
