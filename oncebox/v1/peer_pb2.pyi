from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("instance", "address")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    address: str
    def __init__(self, instance: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class LedPartition(_message.Message):
    __slots__ = ("log_partition", "coordinator_epoch", "serving")
    LOG_PARTITION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    log_partition: int
    coordinator_epoch: int
    serving: bool
    def __init__(self, log_partition: _Optional[int] = ..., coordinator_epoch: _Optional[int] = ..., serving: _Optional[bool] = ...) -> None: ...

class Leading(_message.Message):
    __slots__ = ("instance", "address", "partitions", "leaving")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    instance: str
    address: str
    partitions: _containers.RepeatedCompositeFieldContainer[LedPartition]
    leaving: bool
    def __init__(self, instance: _Optional[str] = ..., address: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[LedPartition, _Mapping]]] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ListOpenRequest(_message.Message):
    __slots__ = ("producer_ids", "open_of")
    PRODUCER_IDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_OF_FIELD_NUMBER: _ClassVar[int]
    producer_ids: _containers.RepeatedScalarFieldContainer[int]
    open_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, producer_ids: _Optional[_Iterable[int]] = ..., open_of: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenProducer(_message.Message):
    __slots__ = ("transactional_id", "number", "producer_id", "epoch")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    number: int
    producer_id: int
    epoch: int
    def __init__(self, transactional_id: _Optional[str] = ..., number: _Optional[int] = ..., producer_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ListOpenResponse(_message.Message):
    __slots__ = ("log_partitions", "open", "held")
    LOG_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    log_partitions: _containers.RepeatedScalarFieldContainer[int]
    open: _containers.RepeatedCompositeFieldContainer[OpenProducer]
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, log_partitions: _Optional[_Iterable[int]] = ..., open: _Optional[_Iterable[_Union[OpenProducer, _Mapping]]] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...
