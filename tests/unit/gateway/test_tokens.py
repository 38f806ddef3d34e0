"""What a batch's commit carries: enough to answer a repeat from the feed alone."""

from random import Random

import pytest

from coordinator.gateway import tokens
from oncebox import batch_token
from oncebox.bulk import Outgoing
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import manifest_pb2, transaction_pb2
from oncebox.wire import TopicPartition


def manifest_of(metadata: bytes, offsets: dict[TopicPartition, list[int]]) -> list[manifest_pb2.Manifest]:
    """As the coordinator would write it, in two parts."""
    written = [
        transaction_pb2.Written(
            topic=where.topic,
            partition=where.partition,
            record_count=len(found),
            runs=[transaction_pb2.Run(offset_first=offset, offset_next=offset + 1) for offset in found],
        )
        for where, found in offsets.items()
    ]
    named = {"transactional_id": "t", "number": 5, "decided_at_ms": 77, "part_count": 2}
    half = len(written) // 2
    return [
        manifest_pb2.Manifest(**named, part=0, written=written[:half], metadata=metadata),  # type: ignore[arg-type]
        manifest_pb2.Manifest(**named, part=1, written=written[half:]),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_repeat_is_answered_from_the_manifest(seed: int):
    random = Random(seed)
    places = [TopicPartition(random.choice("abc"), random.randrange(3)) for _ in range(random.randint(1, 50))]
    offsets: dict[TopicPartition, list[int]] = {}
    expected: list[tuple[TopicPartition, int]] = []
    for where in places:
        found = offsets.setdefault(where, [random.randrange(100)])
        if len(found) > 1 or where in {place for place, _ in expected}:
            found.append(found[-1] + random.randint(1, 3))
        expected.append((where, found[-1]))
    request = pb.CommitBatchRequest(transactional_id="t", request_id="r", metadata=b"mine")
    metadata = tokens.encode(request, places, b"print", b"older")
    remembered = tokens.remembered(manifest_of(metadata, offsets))
    assert remembered is not None
    request_id, what = remembered
    response = pb.CommitBatchResponse.FromString(what.response)
    assert (request_id, what.fingerprint) == ("r", b"print")
    assert [(TopicPartition(r.topic, r.partition), r.offset) for r in response.records] == expected
    assert (response.outcome.number, response.outcome.result) == (5, transaction_pb2.COMMITTED)


def test_the_users_metadata_is_unwrapped():
    request = pb.CommitBatchRequest(request_id="r")
    kept = tokens.encode(request, [], b"", b"older")
    assert batch_token.metadata_of(kept) == b""
    assert batch_token.resume_token_of(kept) == b"older"
    request.metadata = b"newer"
    assert batch_token.resume_token_of(tokens.encode(request, [], b"", b"older")) == b"newer"
    assert batch_token.metadata_of(b"plain") == batch_token.resume_token_of(b"plain") == b"plain"
    assert tokens.remembered([manifest_pb2.Manifest(metadata=b"plain", part_count=1)]) is None


def test_metadata_is_stored_once():
    most = 64 * 1024
    metadata = bytes(60_000)
    request = pb.CommitBatchRequest(request_id="r", metadata=metadata, records=[pb.Record(topic="t")] * 1_000)
    stored = tokens.encode(request, [TopicPartition("t", 3)] * 1_000, b"print", bytes(60_000))
    assert len(stored) < most
    assert batch_token.metadata_of(stored) == batch_token.resume_token_of(stored) == metadata
    assert tokens.too_large(request, bytes(60_000), most) is None
    # As it was stored before.
    twice = batch_token.encode(pb.BatchToken(request_id="r", metadata=b"mine", resume_token=b"mine"))
    assert batch_token.metadata_of(twice) == batch_token.resume_token_of(twice) == b"mine"


def test_what_cannot_be_stored_is_known_before():
    request = pb.CommitBatchRequest(
        request_id="r", metadata=bytes(1_000), records=[pb.Record(topic="t", partition=300)]
    )
    exact = len(tokens.encode(request, [TopicPartition("t", 300)], bytes(tokens.FINGERPRINT_BYTES), b""))
    assert tokens.too_large(request, b"", exact) is None
    refused = tokens.too_large(request, b"", exact - 1)
    assert refused is not None
    assert (refused.code, refused.retriable) == (transaction_pb2.MESSAGE_TOO_LARGE, False)
    assert "1000 bytes of metadata" in refused.message
    # What an earlier commit gave counts where this one gives none.
    request.metadata = b""
    kept = tokens.too_large(request, bytes(1_000), exact - 1)
    assert kept is not None
    assert "earlier commit" in kept.message
    # A partition that nobody can have is refused for what it is, later.
    strange = pb.CommitBatchRequest(request_id="r", records=[pb.Record(topic="t", partition=-1)])
    assert tokens.too_large(strange, b"", exact) is None


def test_fingerprints_tell_records_apart():
    records = [
        Outgoing("t", b"x"),
        Outgoing("t", None),
        Outgoing("t", b""),
        Outgoing("t", b"x", b""),
        Outgoing("t", b"", b"x"),
        Outgoing("t", b"x", partition=0),
        Outgoing("t", b"x", timestamp_ms=0),
        Outgoing("t", b"x", headers=[("a", None)]),
        Outgoing("t", b"x", headers=[("a", b"")]),
        Outgoing("tx", b""),
    ]
    prints = {tokens.fingerprint_of([record], b"") for record in records}
    prints |= {tokens.fingerprint_of(records[:2], b""), tokens.fingerprint_of(records[:1], b"m")}
    assert len(prints) == len(records) + 2
    assert tokens.fingerprint_of(records, b"") == tokens.fingerprint_of(list(records), b"")
