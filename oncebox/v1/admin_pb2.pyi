from oncebox.v1 import transaction_pb2 as _transaction_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRequest(_message.Message):
    __slots__ = ("prefix", "states", "age_min_ms", "page_size", "page_token")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    AGE_MIN_MS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    states: _containers.RepeatedScalarFieldContainer[_transaction_pb2.TransactionState]
    age_min_ms: int
    page_size: int
    page_token: str
    def __init__(self, prefix: _Optional[str] = ..., states: _Optional[_Iterable[_Union[_transaction_pb2.TransactionState, str]]] = ..., age_min_ms: _Optional[int] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class TransactionSummary(_message.Message):
    __slots__ = ("transactional_id", "number", "state", "producer_id", "epoch", "age_ms", "log_partition", "partitions", "metadata")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LOG_PARTITION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    number: int
    state: _transaction_pb2.TransactionState
    producer_id: int
    epoch: int
    age_ms: int
    log_partition: int
    partitions: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.TopicPartitions]
    metadata: bytes
    def __init__(self, transactional_id: _Optional[str] = ..., number: _Optional[int] = ..., state: _Optional[_Union[_transaction_pb2.TransactionState, str]] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., age_ms: _Optional[int] = ..., log_partition: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[_transaction_pb2.TopicPartitions, _Mapping]]] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("transactions", "next_page_token")
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    transactions: _containers.RepeatedCompositeFieldContainer[TransactionSummary]
    next_page_token: str
    def __init__(self, transactions: _Optional[_Iterable[_Union[TransactionSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("transactional_id",)
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    def __init__(self, transactional_id: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("transactional_id", "log_partition", "owner", "grant", "state", "transaction_timeout_ms", "transactions", "outcomes", "has_resume_token", "updated_at_ms")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_PARTITION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    HAS_RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    log_partition: int
    owner: _transaction_pb2.Owner
    grant: _transaction_pb2.Grant
    state: _transaction_pb2.TransactionState
    transaction_timeout_ms: int
    transactions: _containers.RepeatedCompositeFieldContainer[TransactionSummary]
    outcomes: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.Outcome]
    has_resume_token: bool
    updated_at_ms: int
    def __init__(self, transactional_id: _Optional[str] = ..., log_partition: _Optional[int] = ..., owner: _Optional[_Union[_transaction_pb2.Owner, _Mapping]] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., state: _Optional[_Union[_transaction_pb2.TransactionState, str]] = ..., transaction_timeout_ms: _Optional[int] = ..., transactions: _Optional[_Iterable[_Union[TransactionSummary, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[_transaction_pb2.Outcome, _Mapping]]] = ..., has_resume_token: _Optional[bool] = ..., updated_at_ms: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("transactional_id", "number")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    number: int
    def __init__(self, transactional_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _transaction_pb2.Outcome
    def __init__(self, outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ...) -> None: ...

class ForceFenceRequest(_message.Message):
    __slots__ = ("transactional_id", "abort_prepared")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    ABORT_PREPARED_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    abort_prepared: bool
    def __init__(self, transactional_id: _Optional[str] = ..., abort_prepared: _Optional[bool] = ...) -> None: ...

class ForceFenceResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _transaction_pb2.Outcome
    def __init__(self, outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ...) -> None: ...

class ListLeadersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leader(_message.Message):
    __slots__ = ("log_partition", "instance", "address", "coordinator_epoch", "state", "transactional_ids", "debts")
    LOG_PARTITION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONAL_IDS_FIELD_NUMBER: _ClassVar[int]
    DEBTS_FIELD_NUMBER: _ClassVar[int]
    log_partition: int
    instance: str
    address: str
    coordinator_epoch: int
    state: str
    transactional_ids: int
    debts: int
    def __init__(self, log_partition: _Optional[int] = ..., instance: _Optional[str] = ..., address: _Optional[str] = ..., coordinator_epoch: _Optional[int] = ..., state: _Optional[str] = ..., transactional_ids: _Optional[int] = ..., debts: _Optional[int] = ...) -> None: ...

class ListLeadersResponse(_message.Message):
    __slots__ = ("leaders", "log_partition_count")
    LEADERS_FIELD_NUMBER: _ClassVar[int]
    LOG_PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    leaders: _containers.RepeatedCompositeFieldContainer[Leader]
    log_partition_count: int
    def __init__(self, leaders: _Optional[_Iterable[_Union[Leader, _Mapping]]] = ..., log_partition_count: _Optional[int] = ...) -> None: ...

class DescribePartitionRequest(_message.Message):
    __slots__ = ("topic", "partition")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class OpenTransaction(_message.Message):
    __slots__ = ("topic", "partition", "producer_id", "epoch", "offset_first", "age_ms", "kind", "transactional_id", "number", "ends_as", "ended")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[OpenTransaction.Kind]
        ONCEBOX: _ClassVar[OpenTransaction.Kind]
        NATIVE: _ClassVar[OpenTransaction.Kind]
        HANGING: _ClassVar[OpenTransaction.Kind]
        UNKNOWN: _ClassVar[OpenTransaction.Kind]
    KIND_UNSPECIFIED: OpenTransaction.Kind
    ONCEBOX: OpenTransaction.Kind
    NATIVE: OpenTransaction.Kind
    HANGING: OpenTransaction.Kind
    UNKNOWN: OpenTransaction.Kind
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIRST_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENDS_AS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    producer_id: int
    epoch: int
    offset_first: int
    age_ms: int
    kind: OpenTransaction.Kind
    transactional_id: str
    number: int
    ends_as: _transaction_pb2.Result
    ended: bool
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ..., offset_first: _Optional[int] = ..., age_ms: _Optional[int] = ..., kind: _Optional[_Union[OpenTransaction.Kind, str]] = ..., transactional_id: _Optional[str] = ..., number: _Optional[int] = ..., ends_as: _Optional[_Union[_transaction_pb2.Result, str]] = ..., ended: _Optional[bool] = ...) -> None: ...

class DescribePartitionResponse(_message.Message):
    __slots__ = ("offset_stable", "offset_high_watermark", "open")
    OFFSET_STABLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    offset_stable: int
    offset_high_watermark: int
    open: _containers.RepeatedCompositeFieldContainer[OpenTransaction]
    def __init__(self, offset_stable: _Optional[int] = ..., offset_high_watermark: _Optional[int] = ..., open: _Optional[_Iterable[_Union[OpenTransaction, _Mapping]]] = ...) -> None: ...

class FindHangingRequest(_message.Message):
    __slots__ = ("topics", "end")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    end: bool
    def __init__(self, topics: _Optional[_Iterable[str]] = ..., end: _Optional[bool] = ...) -> None: ...

class FindHangingResponse(_message.Message):
    __slots__ = ("hanging", "unexamined")
    HANGING_FIELD_NUMBER: _ClassVar[int]
    UNEXAMINED_FIELD_NUMBER: _ClassVar[int]
    hanging: _containers.RepeatedCompositeFieldContainer[OpenTransaction]
    unexamined: _containers.RepeatedCompositeFieldContainer[UnexaminedPartition]
    def __init__(self, hanging: _Optional[_Iterable[_Union[OpenTransaction, _Mapping]]] = ..., unexamined: _Optional[_Iterable[_Union[UnexaminedPartition, _Mapping]]] = ...) -> None: ...

class UnexaminedPartition(_message.Message):
    __slots__ = ("topic", "partition", "why")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    why: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class WatchTransactionsRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class TransactionEvent(_message.Message):
    __slots__ = ("transaction", "cause", "at_ms")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    transaction: TransactionSummary
    cause: _transaction_pb2.Cause
    at_ms: int
    def __init__(self, transaction: _Optional[_Union[TransactionSummary, _Mapping]] = ..., cause: _Optional[_Union[_transaction_pb2.Cause, str]] = ..., at_ms: _Optional[int] = ...) -> None: ...
