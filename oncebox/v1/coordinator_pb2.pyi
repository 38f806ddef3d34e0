from oncebox.v1 import transaction_pb2 as _transaction_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindCoordinatorRequest(_message.Message):
    __slots__ = ("transactional_id",)
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    def __init__(self, transactional_id: _Optional[str] = ...) -> None: ...

class FindCoordinatorResponse(_message.Message):
    __slots__ = ("address", "instance", "log_partition")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LOG_PARTITION_FIELD_NUMBER: _ClassVar[int]
    address: str
    instance: str
    log_partition: int
    def __init__(self, address: _Optional[str] = ..., instance: _Optional[str] = ..., log_partition: _Optional[int] = ...) -> None: ...

class InitProducerRequest(_message.Message):
    __slots__ = ("transactional_id", "transaction_timeout_ms", "instance", "grant", "without_waiting", "keep_prepared", "slots")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_WAITING_FIELD_NUMBER: _ClassVar[int]
    KEEP_PREPARED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    transaction_timeout_ms: int
    instance: str
    grant: _transaction_pb2.Grant
    without_waiting: bool
    keep_prepared: bool
    slots: int
    def __init__(self, transactional_id: _Optional[str] = ..., transaction_timeout_ms: _Optional[int] = ..., instance: _Optional[str] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., without_waiting: _Optional[bool] = ..., keep_prepared: _Optional[bool] = ..., slots: _Optional[int] = ...) -> None: ...

class InitProducerResponse(_message.Message):
    __slots__ = ("grant", "resume_token", "outcome", "owed", "prepared")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OWED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    grant: _transaction_pb2.Grant
    resume_token: bytes
    outcome: _transaction_pb2.Outcome
    owed: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.TopicPartitions]
    prepared: PreparedTransaction
    def __init__(self, grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., resume_token: _Optional[bytes] = ..., outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ..., owed: _Optional[_Iterable[_Union[_transaction_pb2.TopicPartitions, _Mapping]]] = ..., prepared: _Optional[_Union[PreparedTransaction, _Mapping]] = ...) -> None: ...

class PreparedTransaction(_message.Message):
    __slots__ = ("grant", "resume_token")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    grant: _transaction_pb2.Grant
    resume_token: bytes
    def __init__(self, grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., resume_token: _Optional[bytes] = ...) -> None: ...

class AddPartitionsRequest(_message.Message):
    __slots__ = ("transactional_id", "grant", "partitions", "begun_ms_ago")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    grant: _transaction_pb2.Grant
    partitions: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.TopicPartitions]
    begun_ms_ago: int
    def __init__(self, transactional_id: _Optional[str] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., partitions: _Optional[_Iterable[_Union[_transaction_pb2.TopicPartitions, _Mapping]]] = ..., begun_ms_ago: _Optional[int] = ...) -> None: ...

class AddPartitionsResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _transaction_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ...) -> None: ...

class AddOffsetsRequest(_message.Message):
    __slots__ = ("transactional_id", "grant", "group_ids", "begun_ms_ago")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    grant: _transaction_pb2.Grant
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    begun_ms_ago: int
    def __init__(self, transactional_id: _Optional[str] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., group_ids: _Optional[_Iterable[str]] = ..., begun_ms_ago: _Optional[int] = ...) -> None: ...

class AddOffsetsResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _transaction_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("written", "group_offsets", "metadata")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    written: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.Written]
    group_offsets: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.GroupOffsets]
    metadata: bytes
    def __init__(self, written: _Optional[_Iterable[_Union[_transaction_pb2.Written, _Mapping]]] = ..., group_offsets: _Optional[_Iterable[_Union[_transaction_pb2.GroupOffsets, _Mapping]]] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("transactional_id", "grant", "contents")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    grant: _transaction_pb2.Grant
    contents: Contents
    def __init__(self, transactional_id: _Optional[str] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., contents: _Optional[_Union[Contents, _Mapping]] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _transaction_pb2.Outcome
    def __init__(self, outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("transactional_id", "grant", "result", "contents", "wait", "next_partitions", "next_group_ids")
    class Wait(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMPLETE: _ClassVar[EndRequest.Wait]
        DECIDED: _ClassVar[EndRequest.Wait]
    COMPLETE: EndRequest.Wait
    DECIDED: EndRequest.Wait
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    grant: _transaction_pb2.Grant
    result: _transaction_pb2.Result
    contents: Contents
    wait: EndRequest.Wait
    next_partitions: _containers.RepeatedCompositeFieldContainer[_transaction_pb2.TopicPartitions]
    next_group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transactional_id: _Optional[str] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., result: _Optional[_Union[_transaction_pb2.Result, str]] = ..., contents: _Optional[_Union[Contents, _Mapping]] = ..., wait: _Optional[_Union[EndRequest.Wait, str]] = ..., next_partitions: _Optional[_Iterable[_Union[_transaction_pb2.TopicPartitions, _Mapping]]] = ..., next_group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class EndResponse(_message.Message):
    __slots__ = ("outcome", "next", "next_registered")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    outcome: _transaction_pb2.Outcome
    next: _transaction_pb2.Grant
    next_registered: bool
    def __init__(self, outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ..., next: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., next_registered: _Optional[bool] = ...) -> None: ...

class GetOutcomeRequest(_message.Message):
    __slots__ = ("transactional_id", "number")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    number: int
    def __init__(self, transactional_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GetOutcomeResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _transaction_pb2.Outcome
    def __init__(self, outcome: _Optional[_Union[_transaction_pb2.Outcome, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("transactional_id", "grant", "begun_ms_ago", "extend")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    grant: _transaction_pb2.Grant
    begun_ms_ago: int
    extend: bool
    def __init__(self, transactional_id: _Optional[str] = ..., grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ..., begun_ms_ago: _Optional[int] = ..., extend: _Optional[bool] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _transaction_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_transaction_pb2.Grant, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("request_id", "init_producer", "add_partitions", "add_offsets", "prepare", "end", "get_outcome", "heartbeat", "timeout_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INIT_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ADD_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ADD_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    GET_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    init_producer: InitProducerRequest
    add_partitions: AddPartitionsRequest
    add_offsets: AddOffsetsRequest
    prepare: PrepareRequest
    end: EndRequest
    get_outcome: GetOutcomeRequest
    heartbeat: Heartbeat
    timeout_ms: int
    def __init__(self, request_id: _Optional[int] = ..., init_producer: _Optional[_Union[InitProducerRequest, _Mapping]] = ..., add_partitions: _Optional[_Union[AddPartitionsRequest, _Mapping]] = ..., add_offsets: _Optional[_Union[AddOffsetsRequest, _Mapping]] = ..., prepare: _Optional[_Union[PrepareRequest, _Mapping]] = ..., end: _Optional[_Union[EndRequest, _Mapping]] = ..., get_outcome: _Optional[_Union[GetOutcomeRequest, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("request_id", "init_producer", "add_partitions", "add_offsets", "prepare", "end", "get_outcome", "heartbeat", "error", "fenced")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INIT_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ADD_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ADD_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    GET_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    init_producer: InitProducerResponse
    add_partitions: AddPartitionsResponse
    add_offsets: AddOffsetsResponse
    prepare: PrepareResponse
    end: EndResponse
    get_outcome: GetOutcomeResponse
    heartbeat: HeartbeatResponse
    error: _transaction_pb2.Error
    fenced: _transaction_pb2.Error
    def __init__(self, request_id: _Optional[int] = ..., init_producer: _Optional[_Union[InitProducerResponse, _Mapping]] = ..., add_partitions: _Optional[_Union[AddPartitionsResponse, _Mapping]] = ..., add_offsets: _Optional[_Union[AddOffsetsResponse, _Mapping]] = ..., prepare: _Optional[_Union[PrepareResponse, _Mapping]] = ..., end: _Optional[_Union[EndResponse, _Mapping]] = ..., get_outcome: _Optional[_Union[GetOutcomeResponse, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatResponse, _Mapping]] = ..., error: _Optional[_Union[_transaction_pb2.Error, _Mapping]] = ..., fenced: _Optional[_Union[_transaction_pb2.Error, _Mapping]] = ...) -> None: ...

class SessionRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionResponses(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[SessionResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[SessionResponse, _Mapping]]] = ...) -> None: ...
