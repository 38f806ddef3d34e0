"""Replication messages become whole database transactions; which are skipped is a matter of the commit LSN alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.outbox.mapping import row_of_message
from relay.outbox.pgoutput import ProtocolError, Relation, inserted, parse
from relay.outbox.plan import Assembler, ColumnNames, Piece, TableError
from tests.unit.outbox import messages as m


def assembler(token: int = 0, unclean: int = 0, **columns: str | None) -> Assembler:
    return Assembler(
        token=token,
        unclean=unclean,
        table=("public", "outbox"),
        columns=ColumnNames(**columns),  # type: ignore[arg-type]
        message=row_of_message,
        message_prefix="outbox",
    )


def whole(pieces: list[Piece]) -> list[tuple[int, list[bytes | None], bool]]:
    """Position, ids, whether it ended, of pieces joined by transaction."""
    joined: list[tuple[int, list[bytes | None], bool]] = []
    for piece in pieces:
        ids = [row.id for row in piece.rows]
        if joined and joined[-1][0] == piece.position:
            joined[-1] = (piece.position, joined[-1][1] + ids, piece.end is not None)
        else:
            joined.append((piece.position, ids, piece.end is not None))
    return joined


def test_a_transaction_is_skipped_if_and_only_if_its_commit_lsn_is_not_above_the_token():
    stream = [m.begin(10), m.relation(), m.row("a"), m.commit(10), m.begin(11), m.row("b"), m.commit(11)]
    for token, published in ((9, [False, False]), (10, [True, False]), (11, [True, True])):
        assert [piece.is_published for piece in assembler(token).feed(stream)] == published


def test_rows_of_what_is_published_come_only_where_they_may_have_to_be_cleaned_up():
    message = m.message("outbox", b'{"id": "x"}')
    stream = [m.begin(10), m.relation(), m.row("a"), message, m.commit(10), m.begin(11), m.row("b"), m.commit(11)]
    for token, unclean, counts in (
        (9, 0, [2, 1]),
        (10, 0, [0, 1]),
        (10, 10, [2, 1]),
        (11, 10, [2, 0]),
        (11, 0, [0, 0]),
    ):
        for cut in range(len(stream)):
            plan = assembler(token, unclean)
            pieces = [*plan.feed(stream[:cut]), *plan.feed(stream[cut:])]
            found = whole(pieces)
            assert [(position, len(ids), ended) for position, ids, ended in found] == [
                (10, counts[0], True),
                (11, counts[1], True),
            ]
            assert all(piece.is_published == (piece.position <= token) for piece in pieces)


@given(
    sizes=st.lists(st.integers(min_value=0, max_value=5), max_size=6),
    cuts=st.lists(st.integers(min_value=1, max_value=7), min_size=1, max_size=10),
)
def test_however_the_messages_are_cut_the_transactions_are_the_same(sizes: list[int], cuts: list[int]):
    stream = [m.begin(1), m.relation(), m.commit(1)]
    expected: list[tuple[int, list[bytes], bool]] = [(1, [], True)]
    for number, size in enumerate(sizes, start=2):
        ids = [f"{number}.{index}" for index in range(size)]
        stream += [m.begin(number), *(m.row(each) for each in ids), m.commit(number)]
        expected.append((number, [each.encode() for each in ids], True))
    plan, pieces, at = assembler(), [], 0
    while at < len(stream):
        cut = cuts[at % len(cuts)]
        pieces += list(plan.feed(stream[at : at + cut]))
        at += cut
    plan.check_whole()
    assert whole(pieces) == expected


def test_a_stream_that_ends_inside_a_transaction_is_an_error():
    plan = assembler()
    list(plan.feed([m.begin(1), m.relation(), m.row("a")]))
    with pytest.raises(ProtocolError, match="middle of a transaction"):
        plan.check_whole()


def test_columns_are_found_by_name_wherever_they_stand():
    columns = ("payload", "extra", "aggregateid", "event_id", "aggregatetype")
    plan = assembler(id="event_id", type=None)
    (piece,) = plan.feed(
        [m.begin(5), m.relation(columns=columns), m.insert("{}", "x", "key", "7", "order"), m.commit(5, 99)]
    )
    assert piece.rows == [(b"7", b"order", b"key", b"{}", None, None)]
    assert piece.end == 99


def test_bytea_payloads_are_the_bytes_that_were_meant():
    (piece,) = assembler().feed(
        [m.begin(5), m.relation(payload_oid=m.BYTEA_OID), m.row("a", "\\x00ff"), m.row("b", None), m.commit(5)]
    )
    assert [row.payload for row in piece.rows] == [b"\x00\xff", None]


@pytest.mark.parametrize(
    ("stream", "error", "told"),
    [
        ([m.begin(1), m.relation(columns=("id", "payload"))], TableError, "no column aggregatetype and no aggregateid"),
        ([m.begin(1), m.relation("customers")], TableError, "publication also has the table public.customers"),
        ([m.begin(1), m.begin(2)], ProtocolError, "inside another"),
        ([m.commit(2)], ProtocolError, "has not begun"),
        ([m.begin(1), m.commit(2)], ProtocolError, "has not begun"),
        ([b"Z"], ProtocolError, "'Z'"),
        ([m.begin(1), m.relation(), m.insert("a")], ProtocolError, "1 columns"),
        ([m.begin(1), m.relation(), m.row("a") + b"!"], ProtocolError, "1 bytes too many"),
        ([m.begin(1), m.relation(), m.row("a").replace(b"Nn", b"Nu")[:8] + b"u"], ProtocolError, "'u'"),
    ],
)
def test_what_is_not_understood_is_an_error_never_a_gap(stream, error, told):
    with pytest.raises(error, match=told):
        list(assembler().feed(stream))


def test_updates_deletes_and_strangers_messages_are_read_past():
    stream = [m.begin(1), m.message("other", b"{}"), b"U.", b"D.", b"Y.", b"O.", b"T.", m.commit(1)]
    stream.insert(0, m.message("outbox", b'{"id": 1}', transactional=False))
    (piece,) = assembler().feed(stream)
    assert piece.rows == []


def test_logical_messages_are_rows_too():
    content = b'{"id": 7, "aggregatetype": "order", "aggregateid": "k", "payload": {"a": 1}, "headers": {"h": "v"}}'
    (piece,) = assembler().feed([m.begin(1), m.message("outbox", content), m.message("outbox", b"no"), m.commit(1)])
    assert piece.rows[0] == (b"7", b"order", b"k", b'{"a": 1}', None, b'{"h": "v"}')
    assert piece.rows[1].id is None
    assert row_of_message(b'{"id": 1, "payload_base64": "AP8="}').payload == b"\x00\xff"


def test_a_relation_says_what_it_is():
    found = parse(m.relation())
    assert isinstance(found, Relation)
    assert (found.schema, found.name, [column.name for column in found.columns]) == ("public", "outbox", [*m.COLUMNS])
    assert inserted(m.insert("a", None, relation_id=3)) == (3, [b"a", None])
