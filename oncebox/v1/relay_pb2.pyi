from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RelayState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELAY_STATE_UNSPECIFIED: _ClassVar[RelayState]
    STARTING: _ClassVar[RelayState]
    RUNNING: _ClassVar[RelayState]
    PAUSED: _ClassVar[RelayState]
    STANDBY: _ClassVar[RelayState]
    WAITING: _ClassVar[RelayState]
    STOPPED: _ClassVar[RelayState]
RELAY_STATE_UNSPECIFIED: RelayState
STARTING: RelayState
RUNNING: RelayState
PAUSED: RelayState
STANDBY: RelayState
WAITING: RelayState
STOPPED: RelayState

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PartitionPosition(_message.Message):
    __slots__ = ("topic", "partition", "offset_next", "offset_end", "lag_records", "lag_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_NEXT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_END_FIELD_NUMBER: _ClassVar[int]
    LAG_RECORDS_FIELD_NUMBER: _ClassVar[int]
    LAG_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset_next: int
    offset_end: int
    lag_records: int
    lag_ms: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset_next: _Optional[int] = ..., offset_end: _Optional[int] = ..., lag_records: _Optional[int] = ..., lag_ms: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("name", "instance", "state", "message", "fence", "positions", "rows_per_second", "dead_letters", "since_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    instance: str
    state: RelayState
    message: str
    fence: int
    positions: _containers.RepeatedCompositeFieldContainer[PartitionPosition]
    rows_per_second: float
    dead_letters: int
    since_ms: int
    def __init__(self, name: _Optional[str] = ..., instance: _Optional[str] = ..., state: _Optional[_Union[RelayState, str]] = ..., message: _Optional[str] = ..., fence: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[PartitionPosition, _Mapping]]] = ..., rows_per_second: _Optional[float] = ..., dead_letters: _Optional[int] = ..., since_ms: _Optional[int] = ...) -> None: ...
