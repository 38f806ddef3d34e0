from oncebox.v1 import transaction_pb2 as _transaction_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogKey(_message.Message):
    __slots__ = ("transactional_id", "leader", "partition", "topic")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    leader: bool
    partition: bool
    topic: str
    def __init__(self, transactional_id: _Optional[str] = ..., leader: _Optional[bool] = ..., partition: _Optional[bool] = ..., topic: _Optional[str] = ...) -> None: ...

class LogValue(_message.Message):
    __slots__ = ("version", "id", "leader", "partition", "topic")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    version: int
    id: IdState
    leader: LeaderState
    partition: PartitionState
    topic: TopicState
    def __init__(self, version: _Optional[int] = ..., id: _Optional[_Union[IdState, _Mapping]] = ..., leader: _Optional[_Union[LeaderState, _Mapping]] = ..., partition: _Optional[_Union[PartitionState, _Mapping]] = ..., topic: _Optional[_Union[TopicState, _Mapping]] = ...) -> None: ...

class LeaderState(_message.Message):
    __slots__ = ("generation", "epoch", "nonce", "instance", "address", "log_topic_id")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOG_TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: int
    nonce: bytes
    instance: str
    address: str
    log_topic_id: bytes
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[int] = ..., nonce: _Optional[bytes] = ..., instance: _Optional[str] = ..., address: _Optional[str] = ..., log_topic_id: _Optional[bytes] = ...) -> None: ...

class PartitionState(_message.Message):
    __slots__ = ("number_floor",)
    NUMBER_FLOOR_FIELD_NUMBER: _ClassVar[int]
    number_floor: int
    def __init__(self, number_floor: _Optional[int] = ...) -> None: ...

class TopicState(_message.Message):
    __slots__ = ("topic_id", "change")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    change: int
    def __init__(self, topic_id: _Optional[bytes] = ..., change: _Optional[int] = ...) -> None: ...

class IdState(_message.Message):
    __slots__ = ("slots", "number", "slot", "origin", "origin_number", "owner", "transaction_timeout_ms", "slots_max", "transactions", "outcomes", "resume_token", "updated_at_ms")
    class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INIT: _ClassVar[IdState.Origin]
        END: _ClassVar[IdState.Origin]
    INIT: IdState.Origin
    END: IdState.Origin
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    number: int
    slot: int
    origin: IdState.Origin
    origin_number: int
    owner: _transaction_pb2.Owner
    transaction_timeout_ms: int
    slots_max: int
    transactions: _containers.RepeatedCompositeFieldContainer[TransactionRecord]
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeRecord]
    resume_token: bytes
    updated_at_ms: int
    def __init__(self, slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ..., number: _Optional[int] = ..., slot: _Optional[int] = ..., origin: _Optional[_Union[IdState.Origin, str]] = ..., origin_number: _Optional[int] = ..., owner: _Optional[_Union[_transaction_pb2.Owner, _Mapping]] = ..., transaction_timeout_ms: _Optional[int] = ..., slots_max: _Optional[int] = ..., transactions: _Optional[_Iterable[_Union[TransactionRecord, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[OutcomeRecord, _Mapping]]] = ..., resume_token: _Optional[bytes] = ..., updated_at_ms: _Optional[int] = ...) -> None: ...

class Slot(_message.Message):
    __slots__ = ("producer_id", "epoch", "since_ms", "topic_changes")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    TOPIC_CHANGES_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    epoch: int
    since_ms: int
    topic_changes: int
    def __init__(self, producer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., since_ms: _Optional[int] = ..., topic_changes: _Optional[int] = ...) -> None: ...

class TransactionRecord(_message.Message):
    __slots__ = ("number", "producer_id", "epoch", "state", "partitions", "groups", "written", "group_offsets", "metadata", "started_at_ms", "decided_at_ms", "cause", "decision", "feed_offset_first", "feed_offset_next")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    FEED_OFFSET_FIRST_FIELD_NUMBER: _ClassVar[int]
    FEED_OFFSET_NEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    producer_id: int
    epoch: int
    state: _transaction_pb2.TransactionState
    partitions: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.TopicPartitions]
    groups: _containers.RepeatedCompositeFieldContainer[GroupPartition]
    written: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.Written]
    group_offsets: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.GroupOffsets]
    metadata: bytes
    started_at_ms: int
    decided_at_ms: int
    cause: _transaction_pb2.Cause
    decision: int
    feed_offset_first: int
    feed_offset_next: int
    def __init__(self, number: _Optional[int] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[_transaction_pb2.TransactionState, str]] = ..., partitions: _Optional[_Iterable[_Union[_transaction_pb2.TopicPartitions, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupPartition, _Mapping]]] = ..., written: _Optional[_Iterable[_Union[_transaction_pb2.Written, _Mapping]]] = ..., group_offsets: _Optional[_Iterable[_Union[_transaction_pb2.GroupOffsets, _Mapping]]] = ..., metadata: _Optional[bytes] = ..., started_at_ms: _Optional[int] = ..., decided_at_ms: _Optional[int] = ..., cause: _Optional[_Union[_transaction_pb2.Cause, str]] = ..., decision: _Optional[int] = ..., feed_offset_first: _Optional[int] = ..., feed_offset_next: _Optional[int] = ...) -> None: ...

class GroupPartition(_message.Message):
    __slots__ = ("group_id", "partition")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    partition: int
    def __init__(self, group_id: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class OutcomeRecord(_message.Message):
    __slots__ = ("number", "producer_id", "epoch", "result", "cause", "decided_at_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    producer_id: int
    epoch: int
    result: _transaction_pb2.Result
    cause: _transaction_pb2.Cause
    decided_at_ms: int
    def __init__(self, number: _Optional[int] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., result: _Optional[_Union[_transaction_pb2.Result, str]] = ..., cause: _Optional[_Union[_transaction_pb2.Cause, str]] = ..., decided_at_ms: _Optional[int] = ...) -> None: ...
