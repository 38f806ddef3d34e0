"""What the gateway stores with the commit of a batch, and how it is found again. Pure.

The token is the commit's metadata: the log decides commit and request id in one append, and the feed tells both.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from coordinator.gateway import convert
from oncebox import batch_token
from oncebox.bulk import Outgoing
from oncebox.v1 import gateway_pb2 as pb
from oncebox.v1 import manifest_pb2, transaction_pb2
from oncebox.wire import TopicPartition

FINGERPRINT_BYTES = 16
ABSENT = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """A request that was committed."""

    fingerprint: bytes
    # CommitBatchResponse, packed: many are held for a while, few are asked for.
    response: bytes


def encode(
    request: pb.CommitBatchRequest, places: Sequence[TopicPartition], fingerprint: bytes, resume_token: bytes
) -> bytes:
    topics = {where.topic: None for where in places}
    index = {topic: number for number, topic in enumerate(topics)}
    token = pb.BatchToken(
        request_id=request.request_id,
        fingerprint=fingerprint,
        metadata=request.metadata,
        # Not twice: where there is metadata, it is the resume token.
        resume_token=b"" if request.metadata else resume_token,
        topics=list(topics),
        topic_indexes=[index[where.topic] for where in places],
        partitions=[where.partition for where in places],
    )
    return batch_token.encode(token)


def too_large(request: pb.CommitBatchRequest, resume_token: bytes, bytes_max: int) -> transaction_pb2.Error | None:
    """The refusal of a batch whose commit could not carry its token, wherever its records go."""
    places = [TopicPartition(record.topic, max(record.partition, 0)) for record in request.records]
    size = len(encode(request, places, bytes(FINGERPRINT_BYTES), resume_token))
    if size <= bytes_max:
        return None
    kept, advice = len(request.metadata), "give less metadata, or fewer records"
    if resume_token and not request.metadata:
        kept, advice = len(resume_token), "give fewer records, or metadata in the place of what an earlier commit gave"
    return convert.refusal(
        f"{kept} bytes of metadata and what is kept of the batch itself are {size} bytes, {bytes_max} are possible: "
        f"{advice}",
        transaction_pb2.MESSAGE_TOO_LARGE,
    )


def fingerprint_of(records: Iterable[Outgoing], metadata: bytes) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)

    def add(data: bytes | None) -> None:
        digest.update(ABSENT if data is None else len(data).to_bytes(4))
        digest.update(data or b"")

    add(metadata)
    for record in records:
        add(record.topic.encode())
        add(record.key)
        add(record.value)
        for number in (record.partition, record.timestamp_ms):
            add(None if number is None else number.to_bytes(8, signed=True))
        for name, value in record.headers:
            add(name.encode())
            add(value)
        digest.update(b"\x00")
    return digest.digest()


def response_of(outcome: transaction_pb2.Outcome, found: Sequence[pb.RecordMetadata]) -> pb.CommitBatchResponse:
    return pb.CommitBatchResponse(outcome=outcome, records=found)


def remembered(parts: Sequence[manifest_pb2.Manifest]) -> tuple[str, Remembered] | None:
    """The request that a commit in the feed was, from all parts of its manifest; None: it was none of a batch."""
    first = parts[0]
    token = batch_token.decode(first.metadata)
    if token is None:
        return None
    offsets = {(entry.topic, entry.partition): _offsets(entry) for part in parts for entry in part.written}
    records = []
    for topic_index, partition in zip(token.topic_indexes, token.partitions, strict=True):
        topic = token.topics[topic_index]
        records.append(pb.RecordMetadata(topic=topic, partition=partition, offset=next(offsets[topic, partition])))
    outcome = transaction_pb2.Outcome(
        transactional_id=first.transactional_id,
        number=first.number,
        result=transaction_pb2.COMMITTED,
        decided_at_ms=first.decided_at_ms,
        state=transaction_pb2.TransactionState.COMPLETE_COMMIT,
    )
    return token.request_id, Remembered(
        fingerprint=token.fingerprint,
        response=response_of(outcome, records).SerializeToString(),
    )


def _offsets(entry: transaction_pb2.Written) -> Iterator[int]:
    for run in entry.runs:
        yield from range(run.offset_first, run.offset_next)
