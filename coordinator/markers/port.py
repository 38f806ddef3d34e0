"""What the coordinator asks of whoever writes control markers, and what the writer asks of Kafka.

The simulator has its own Markers, or its own Brokers under the real writer.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from coordinator.core.owed import Debt
from coordinator.core.records import TopicPartition
from oncebox import wire


class Payment(Protocol):
    """A debt whose markers are being written."""

    @property
    def dropped(self) -> frozenset[TopicPartition]:
        """Partitions told as paid because they are gone from the cluster: no marker stands there."""

    def cancel(self) -> None:
        """Leadership is lost: nothing more is sent for this debt, and nothing more is told of it."""


class Markers(Protocol):
    def pay(self, debt: Debt, *, coordinator_epoch: int, paid: Callable[[TopicPartition], None]) -> Payment:
        """Returns at once. `paid` is called once per partition, when its marker is durable (or proved needless), never
        from within this call. Debts of one producer id must be given in epoch order.
        """


class Brokers(Protocol):
    """The part of oncebox.wire.Wire that the writer uses."""

    @property
    def brokers(self) -> Mapping[int, Any]: ...

    def leader_id(self, partition: wire.TopicPartition) -> int | None: ...

    async def metadata(self, topics: Collection[str] | None, *, timeout_ms: int) -> wire.ClusterMetadata: ...

    async def write_txn_markers(
        self, node_id: int, markers: Sequence[wire.TxnMarker], *, timeout_ms: int, lane: str
    ) -> dict[int, dict[wire.TopicPartition, wire.ErrorCode]]: ...

    async def describe_producers(
        self, node_id: int, partitions: Iterable[wire.TopicPartition], *, timeout_ms: int, lane: str
    ) -> dict[wire.TopicPartition, wire.PartitionProducers]: ...
