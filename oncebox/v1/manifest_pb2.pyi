from oncebox.v1 import transaction_pb2 as _transaction_pb2
from oncebox.v1 import log_pb2 as _log_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeedRecord(_message.Message):
    __slots__ = ("version", "manifest", "leader")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    version: int
    manifest: Manifest
    leader: _log_pb2.LeaderState
    def __init__(self, version: _Optional[int] = ..., manifest: _Optional[_Union[Manifest, _Mapping]] = ..., leader: _Optional[_Union[_log_pb2.LeaderState, _Mapping]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("transactional_id", "number", "producer_id", "epoch", "started_at_ms", "decided_at_ms", "part", "part_count", "written", "group_offsets", "metadata")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    number: int
    producer_id: int
    epoch: int
    started_at_ms: int
    decided_at_ms: int
    part: int
    part_count: int
    written: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.Written]
    group_offsets: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.GroupOffsets]
    metadata: bytes
    def __init__(self, transactional_id: _Optional[str] = ..., number: _Optional[int] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., started_at_ms: _Optional[int] = ..., decided_at_ms: _Optional[int] = ..., part: _Optional[int] = ..., part_count: _Optional[int] = ..., written: _Optional[_Iterable[_Union[_transaction_pb2.Written, _Mapping]]] = ..., group_offsets: _Optional[_Iterable[_Union[_transaction_pb2.GroupOffsets, _Mapping]]] = ..., metadata: _Optional[bytes] = ...) -> None: ...
