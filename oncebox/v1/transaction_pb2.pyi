from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransactionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSACTION_STATE_UNSPECIFIED: _ClassVar[TransactionState]
    EMPTY: _ClassVar[TransactionState]
    ONGOING: _ClassVar[TransactionState]
    PREPARED: _ClassVar[TransactionState]
    PREPARE_COMMIT: _ClassVar[TransactionState]
    PREPARE_ABORT: _ClassVar[TransactionState]
    COMPLETE_COMMIT: _ClassVar[TransactionState]
    COMPLETE_ABORT: _ClassVar[TransactionState]
    DEAD: _ClassVar[TransactionState]

class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNDECIDED: _ClassVar[Result]
    COMMITTED: _ClassVar[Result]
    ABORTED: _ClassVar[Result]

class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAUSE_UNSPECIFIED: _ClassVar[Cause]
    OWNER: _ClassVar[Cause]
    TIMEOUT: _ClassVar[Cause]
    NEWER_INSTANCE: _ClassVar[Cause]
    ADMINISTRATOR: _ClassVar[Cause]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[ErrorCode]
    UNKNOWN_SERVER_ERROR: _ClassVar[ErrorCode]
    REQUEST_TIMED_OUT: _ClassVar[ErrorCode]
    COORDINATOR_LOAD_IN_PROGRESS: _ClassVar[ErrorCode]
    COORDINATOR_NOT_AVAILABLE: _ClassVar[ErrorCode]
    NOT_COORDINATOR: _ClassVar[ErrorCode]
    UNKNOWN_TOPIC_OR_PARTITION: _ClassVar[ErrorCode]
    INVALID_TOPIC_EXCEPTION: _ClassVar[ErrorCode]
    INVALID_REQUEST: _ClassVar[ErrorCode]
    OUT_OF_ORDER_SEQUENCE_NUMBER: _ClassVar[ErrorCode]
    DUPLICATE_SEQUENCE_NUMBER: _ClassVar[ErrorCode]
    INVALID_PRODUCER_EPOCH: _ClassVar[ErrorCode]
    INVALID_TXN_STATE: _ClassVar[ErrorCode]
    INVALID_PRODUCER_ID_MAPPING: _ClassVar[ErrorCode]
    INVALID_TRANSACTION_TIMEOUT: _ClassVar[ErrorCode]
    CONCURRENT_TRANSACTIONS: _ClassVar[ErrorCode]
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED: _ClassVar[ErrorCode]
    TOPIC_AUTHORIZATION_FAILED: _ClassVar[ErrorCode]
    GROUP_AUTHORIZATION_FAILED: _ClassVar[ErrorCode]
    CLUSTER_AUTHORIZATION_FAILED: _ClassVar[ErrorCode]
    SASL_AUTHENTICATION_FAILED: _ClassVar[ErrorCode]
    MESSAGE_TOO_LARGE: _ClassVar[ErrorCode]
    PRODUCER_FENCED: _ClassVar[ErrorCode]
    TRANSACTIONAL_ID_NOT_FOUND: _ClassVar[ErrorCode]
    THROTTLING_QUOTA_EXCEEDED: _ClassVar[ErrorCode]
    TRANSACTION_ABORTABLE: _ClassVar[ErrorCode]
    OUTCOME_EXPIRED: _ClassVar[ErrorCode]
TRANSACTION_STATE_UNSPECIFIED: TransactionState
EMPTY: TransactionState
ONGOING: TransactionState
PREPARED: TransactionState
PREPARE_COMMIT: TransactionState
PREPARE_ABORT: TransactionState
COMPLETE_COMMIT: TransactionState
COMPLETE_ABORT: TransactionState
DEAD: TransactionState
UNDECIDED: Result
COMMITTED: Result
ABORTED: Result
CAUSE_UNSPECIFIED: Cause
OWNER: Cause
TIMEOUT: Cause
NEWER_INSTANCE: Cause
ADMINISTRATOR: Cause
NONE: ErrorCode
UNKNOWN_SERVER_ERROR: ErrorCode
REQUEST_TIMED_OUT: ErrorCode
COORDINATOR_LOAD_IN_PROGRESS: ErrorCode
COORDINATOR_NOT_AVAILABLE: ErrorCode
NOT_COORDINATOR: ErrorCode
UNKNOWN_TOPIC_OR_PARTITION: ErrorCode
INVALID_TOPIC_EXCEPTION: ErrorCode
INVALID_REQUEST: ErrorCode
OUT_OF_ORDER_SEQUENCE_NUMBER: ErrorCode
DUPLICATE_SEQUENCE_NUMBER: ErrorCode
INVALID_PRODUCER_EPOCH: ErrorCode
INVALID_TXN_STATE: ErrorCode
INVALID_PRODUCER_ID_MAPPING: ErrorCode
INVALID_TRANSACTION_TIMEOUT: ErrorCode
CONCURRENT_TRANSACTIONS: ErrorCode
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: ErrorCode
TOPIC_AUTHORIZATION_FAILED: ErrorCode
GROUP_AUTHORIZATION_FAILED: ErrorCode
CLUSTER_AUTHORIZATION_FAILED: ErrorCode
SASL_AUTHENTICATION_FAILED: ErrorCode
MESSAGE_TOO_LARGE: ErrorCode
PRODUCER_FENCED: ErrorCode
TRANSACTIONAL_ID_NOT_FOUND: ErrorCode
THROTTLING_QUOTA_EXCEEDED: ErrorCode
TRANSACTION_ABORTABLE: ErrorCode
OUTCOME_EXPIRED: ErrorCode

class Grant(_message.Message):
    __slots__ = ("number", "producer_id", "epoch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    producer_id: int
    epoch: int
    def __init__(self, number: _Optional[int] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class TopicPartitions(_message.Message):
    __slots__ = ("topic", "partitions")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, topic: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("offset_first", "offset_next")
    OFFSET_FIRST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_NEXT_FIELD_NUMBER: _ClassVar[int]
    offset_first: int
    offset_next: int
    def __init__(self, offset_first: _Optional[int] = ..., offset_next: _Optional[int] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("topic", "partition", "record_count", "runs", "topic_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    RECORD_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    record_count: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    topic_id: bytes
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., record_count: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., topic_id: _Optional[bytes] = ...) -> None: ...

class GroupOffset(_message.Message):
    __slots__ = ("topic", "partition", "offset_next", "metadata")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_NEXT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset_next: int
    metadata: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset_next: _Optional[int] = ..., metadata: _Optional[str] = ...) -> None: ...

class GroupOffsets(_message.Message):
    __slots__ = ("group_id", "offsets")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    def __init__(self, group_id: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("transactional_id", "number", "result", "cause", "decided_at_ms", "owed", "state")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    number: int
    result: Result
    cause: Cause
    decided_at_ms: int
    owed: _containers.RepeatedCompositeFieldContainer[TopicPartitions]
    state: TransactionState
    def __init__(self, transactional_id: _Optional[str] = ..., number: _Optional[int] = ..., result: _Optional[_Union[Result, str]] = ..., cause: _Optional[_Union[Cause, str]] = ..., decided_at_ms: _Optional[int] = ..., owed: _Optional[_Iterable[_Union[TopicPartitions, _Mapping]]] = ..., state: _Optional[_Union[TransactionState, str]] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("instance", "address", "since_ms", "number_first", "cause")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIRST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    address: str
    since_ms: int
    number_first: int
    cause: Cause
    def __init__(self, instance: _Optional[str] = ..., address: _Optional[str] = ..., since_ms: _Optional[int] = ..., number_first: _Optional[int] = ..., cause: _Optional[_Union[Cause, str]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "transactional_id", "number", "retriable", "leader_address", "owner", "outcome")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    transactional_id: str
    number: int
    retriable: bool
    leader_address: str
    owner: Owner
    outcome: Outcome
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., transactional_id: _Optional[str] = ..., number: _Optional[int] = ..., retriable: _Optional[bool] = ..., leader_address: _Optional[str] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...
