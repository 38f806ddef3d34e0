from oncebox.v1 import transaction_pb2 as _transaction_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("topic", "partition", "key", "value", "headers", "timestamp_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    key: bytes
    value: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    timestamp_ms: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., timestamp_ms: _Optional[int] = ...) -> None: ...

class RecordMetadata(_message.Message):
    __slots__ = ("topic", "partition", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("transactional_id", "transaction_timeout_ms", "instance", "resume_number", "grace_ms")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RESUME_NUMBER_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    transaction_timeout_ms: int
    instance: str
    resume_number: int
    grace_ms: int
    def __init__(self, transactional_id: _Optional[str] = ..., transaction_timeout_ms: _Optional[int] = ..., instance: _Optional[str] = ..., resume_number: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Send(_message.Message):
    __slots__ = ("records", "acknowledge")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    acknowledge: bool
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., acknowledge: _Optional[bool] = ...) -> None: ...

class SendOffsets(_message.Message):
    __slots__ = ("offsets", "generation", "member_id", "group_instance_id")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    offsets: _transaction_pb2.GroupOffsets
    generation: int
    member_id: str
    group_instance_id: str
    def __init__(self, offsets: _Optional[_Union[_transaction_pb2.GroupOffsets, _Mapping]] = ..., generation: _Optional[int] = ..., member_id: _Optional[str] = ..., group_instance_id: _Optional[str] = ...) -> None: ...

class PrepareTransaction(_message.Message):
    __slots__ = ("metadata",)
    METADATA_FIELD_NUMBER: _ClassVar[int]
    metadata: bytes
    def __init__(self, metadata: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("metadata", "decided")
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    metadata: bytes
    decided: bool
    def __init__(self, metadata: _Optional[bytes] = ..., decided: _Optional[bool] = ...) -> None: ...

class AbortTransaction(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransactRequest(_message.Message):
    __slots__ = ("request_id", "open", "begin", "send", "send_offsets", "prepare", "commit", "abort")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    SEND_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    open: Open
    begin: Begin
    send: Send
    send_offsets: SendOffsets
    prepare: PrepareTransaction
    commit: Commit
    abort: AbortTransaction
    def __init__(self, request_id: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., send_offsets: _Optional[_Union[SendOffsets, _Mapping]] = ..., prepare: _Optional[_Union[PrepareTransaction, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[AbortTransaction, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("number", "resume_token", "window_bytes", "outcome", "resumed", "last_request_id", "refused")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    number: int
    resume_token: bytes
    window_bytes: int
    outcome: _transaction_pb2.Outcome
    resumed: bool
    last_request_id: int
    refused: _containers.RepeatedCompositeFieldContainer[RefusedRequest]
    def __init__(self, number: _Optional[int] = ..., resume_token: _Optional[bytes] = ..., window_bytes: _Optional[int] = ..., outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ..., resumed: _Optional[bool] = ..., last_request_id: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[RefusedRequest, _Mapping]]] = ...) -> None: ...

class RefusedRequest(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: _transaction_pb2.Error
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[_Union[_transaction_pb2.Error, _Mapping]] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("records", "window_bytes")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RecordMetadata]
    window_bytes: int
    def __init__(self, records: _Optional[_Iterable[_Union[RecordMetadata, _Mapping]]] = ..., window_bytes: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class TransactResponse(_message.Message):
    __slots__ = ("request_id", "opened", "done", "sent", "outcome", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    opened: Opened
    done: Done
    sent: Sent
    outcome: _transaction_pb2.Outcome
    error: _transaction_pb2.Error
    def __init__(self, request_id: _Optional[int] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ..., error: _Optional[_Union[_transaction_pb2.Error, _Mapping]] = ...) -> None: ...

class CommitBatchRequest(_message.Message):
    __slots__ = ("transactional_id", "request_id", "records", "metadata")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    request_id: str
    records: _containers.RepeatedCompositeFieldContainer[Record]
    metadata: bytes
    def __init__(self, transactional_id: _Optional[str] = ..., request_id: _Optional[str] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class CommitBatchResponse(_message.Message):
    __slots__ = ("outcome", "records", "repeated")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    outcome: _transaction_pb2.Outcome
    records: _containers.RepeatedCompositeFieldContainer[RecordMetadata]
    repeated: bool
    def __init__(self, outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ..., records: _Optional[_Iterable[_Union[RecordMetadata, _Mapping]]] = ..., repeated: _Optional[bool] = ...) -> None: ...

class BatchToken(_message.Message):
    __slots__ = ("request_id", "fingerprint", "metadata", "resume_token", "topics", "topic_indexes", "partitions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    TOPIC_INDEXES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: bytes
    metadata: bytes
    resume_token: bytes
    topics: _containers.RepeatedScalarFieldContainer[str]
    topic_indexes: _containers.RepeatedScalarFieldContainer[int]
    partitions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., metadata: _Optional[bytes] = ..., resume_token: _Optional[bytes] = ..., topics: _Optional[_Iterable[str]] = ..., topic_indexes: _Optional[_Iterable[int]] = ..., partitions: _Optional[_Iterable[int]] = ...) -> None: ...
