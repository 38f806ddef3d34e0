"""Oncebox: exactly-once, from a gRPC call to Kafka to PostgreSQL and back.

    from oncebox import Producer

All other errors are in oncebox.errors, but for the few that only a reader, atomic() or several processes have: they
stand there. Imported when first asked for, so that the command starts quickly.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncebox.atomic_commit import atomic as atomic
    from oncebox.atomic_commit import recover as recover
    from oncebox.bulk import Outgoing as Outgoing
    from oncebox.channels import SecureChannel as SecureChannel
    from oncebox.errors import OnceboxError as OnceboxError
    from oncebox.group_offsets import GroupMetadata as GroupMetadata
    from oncebox.partitioner import round_robin as round_robin
    from oncebox.partitioner import sticky as sticky
    from oncebox.producer import Producer as Producer
    from oncebox.producer import ProducerSettings as ProducerSettings
    from oncebox.producer import Transaction as Transaction
    from oncebox.reader import Record as Record
    from oncebox.reader import read_transactions as read_transactions
    from oncebox.transform_loop import TransformSettings as TransformSettings
    from oncebox.transform_loop import transform as transform
    from oncebox.transform_processes import transform_in_processes as transform_in_processes
    from oncebox.wire import Compression as Compression
    from oncebox.wire import GroupMember as GroupMember
    from oncebox.wire import KafkaSettings as KafkaSettings
    from oncebox.wire import TopicPartition as TopicPartition
    from oncebox.writer_settings import WriterSettings as WriterSettings

__version__ = "0.1.0"

_HOMES = {
    "Compression": "wire",
    "GroupMember": "wire",
    "GroupMetadata": "group_offsets",
    "KafkaSettings": "wire",
    "OnceboxError": "errors",
    "Outgoing": "bulk",
    "Record": "reader",
    "Producer": "producer",
    "ProducerSettings": "producer",
    "SecureChannel": "channels",
    "TopicPartition": "wire",
    "Transaction": "producer",
    "TransformSettings": "transform_loop",
    "WriterSettings": "writer_settings",
    "atomic": "atomic_commit",
    "read_transactions": "reader",
    "recover": "atomic_commit",
    "round_robin": "partitioner",
    "sticky": "partitioner",
    "transform": "transform_loop",
    "transform_in_processes": "transform_processes",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"oncebox.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'oncebox' has no attribute {name!r}")
