"""A consumer group's offsets as part of a transaction: sent to the group's coordinator, fenced by its generation.

A refusal that will not pass is told by class: GroupFencedError where the group has gone on without the consumer.
Repeating is safe: the same offsets of the same transaction are stored once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from struct import unpack_from
from typing import TYPE_CHECKING

from oncebox.errors import GroupFencedError, OffsetsRefusedError, UsageError
from oncebox.v1 import transaction_pb2
from oncebox.wire import CommittedOffset, ErrorCode, GroupMember, OutcomeUnknownError, TopicPartition, Wire, WireError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oncebox.partition_queue import Identity

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0
METADATA_TIMEOUT_MS = 5_000
# A coordinator that stands still is left in time for its successor; one that only waits for replicas says so sooner.
ATTEMPT_S = 10.0
MAGIC = b"CGMDv2:"
FENCED = frozenset(
    {
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.STALE_MEMBER_EPOCH,
        ErrorCode.REBALANCE_IN_PROGRESS,
    }
)
# Our transaction itself has been ended by somebody else.
ENDED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata:
    """A consumer's membership, for the broker to fence it (KIP-447)."""

    group_id: str
    member: GroupMember


class TransactionEndedError(Exception):
    """Inside the client only: the broker refuses our epoch; the coordinator knows why."""


def group_metadata(given: GroupMetadata | bytes | str, member: GroupMember | None = None) -> GroupMetadata:
    """From a group's name (nobody is fenced), or from confluent-kafka's Consumer.consumer_group_metadata()."""
    if isinstance(given, GroupMetadata):
        return given
    if isinstance(given, str):
        return GroupMetadata(group_id=given, member=member or GroupMember())
    # librdkafka: magic, generation in this machine's byte order, group and member ending with zeros, a flag that there
    # is no group instance id, else that id.
    if not given.startswith(MAGIC):
        raise UsageError("this is not what Consumer.consumer_group_metadata() returns")
    (generation_id,) = unpack_from("=i", given, len(MAGIC))
    group_id, member_id, rest = given[len(MAGIC) + 4 :].split(b"\0", 2)
    instance_id = None if rest[:1] == b"\1" else rest[1:].rstrip(b"\0").decode()
    return GroupMetadata(
        group_id=group_id.decode(),
        member=GroupMember(member_id=member_id.decode(), generation_id=generation_id, group_instance_id=instance_id),
    )


def as_committed(offsets: Mapping[TopicPartition, int | CommittedOffset]) -> dict[TopicPartition, CommittedOffset]:
    return {
        where: offset if isinstance(offset, CommittedOffset) else CommittedOffset(offset=offset)
        for where, offset in offsets.items()
    }


def as_messages(
    offsets: Mapping[str, Mapping[TopicPartition, CommittedOffset]],
) -> list[transaction_pb2.GroupOffsets]:
    """By group: what a commit tells of them."""
    return [
        transaction_pb2.GroupOffsets(
            group_id=group_id,
            offsets=[
                transaction_pb2.GroupOffset(
                    topic=where.topic,
                    partition=where.partition,
                    offset_next=committed.offset,
                    metadata=committed.metadata or "",
                )
                for where, committed in of_group.items()
            ],
        )
        for group_id, of_group in offsets.items()
    ]


class GroupOffsetsSender:
    """Knows each group's coordinator as long as it answers."""

    def __init__(self, wire: Wire, timeout_ms: int) -> None:
        self._wire = wire
        self._timeout_ms = timeout_ms
        self._coordinators: dict[str, int] = {}

    async def send(
        self, committed: Mapping[TopicPartition, CommittedOffset], group: GroupMetadata, identity: Identity
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_ms / 1000
        pause_s = RETRY_FIRST_S
        while True:
            left_s = max(deadline - loop.time(), 0.001)
            problem = await self._try(committed, group, identity, min(left_s, ATTEMPT_S))
            if not problem:
                return
            self._coordinators.pop(group.group_id, None)
            if loop.time() + pause_s > deadline:
                raise OffsetsRefusedError(f"the offsets were not taken within {self._timeout_ms} ms: {problem}")
            await asyncio.sleep(pause_s)
            with suppress(WireError):
                # Who knows the group's coordinator may be gone as well.
                await self._wire.metadata((), timeout_ms=METADATA_TIMEOUT_MS)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _try(
        self, offsets: Mapping[TopicPartition, CommittedOffset], group: GroupMetadata, identity: Identity, left_s: float
    ) -> str:
        """Empty: done. Else what prevents it, for now."""
        timeout_ms = max(int(left_s * 1000), 1)
        node_id = self._coordinators.get(group.group_id)
        try:
            if node_id is None:
                found = await self._wire.find_group_coordinator(group.group_id, timeout_ms=timeout_ms)
                if found.node_id is None:
                    return _check(found.error, group, "")
                node_id = self._coordinators[group.group_id] = found.node_id
            answer = await self._wire.txn_offset_commit(
                node_id,
                offsets,
                group_id=group.group_id,
                member=group.member,
                transactional_id=identity.transactional_id or "",
                producer_id=identity.producer_id,
                producer_epoch=identity.epoch,
                timeout_ms=timeout_ms,
            )
        except OutcomeUnknownError as error:
            if node_id is not None:
                self._wire.doubt(node_id)
            return str(error)
        except WireError as error:
            raise OffsetsRefusedError(f"the group {group.group_id!r} cannot be reached: {error}") from error
        problems = [_check(error, group, f" of {where.topic}:{where.partition}") for where, error in answer.items()]
        problem = next(filter(None, problems), "")
        if problem:
            # Or whoever named it is cut off from the others.
            self._wire.doubt(None if ErrorCode.NOT_COORDINATOR in answer.values() else node_id)
        return problem


def _check(error: ErrorCode, group: GroupMetadata, whose: str) -> str:
    if error is ErrorCode.NONE:
        return ""
    if error in ENDED:
        raise TransactionEndedError
    told = f"the group {group.group_id!r} refuses the offset{whose}: {error.name}"
    if error in FENCED:
        raise GroupFencedError(told, error.name)
    if not error.retriable:
        raise OffsetsRefusedError(told, error.name)
    return told
