"""Our Kafka requests on aiokafka: produce as any producer id, transaction markers, offsets, metadata with
topic ids.

`Wire` sends them; everything else here is data, or a function of data. No retries and no state beyond
connections and the last metadata: who uses it decides what an error means.
"""

from oncebox.wire.batches import Compression, Record, batch_builder, encode_batch, sequence_after
from oncebox.wire.client import DEFAULT_TIMEOUT_MS, Wire
from oncebox.wire.errors import (
    AuthenticationError,
    ErrorCode,
    OutcomeUnknownError,
    UnsupportedRequestError,
    WireError,
)
from oncebox.wire.groups import OFFSETS_TOPIC, offsets_partition
from oncebox.wire.settings import FETCH_BACKOFF_MS, KafkaSettings, aiokafka_options, librdkafka_config
from oncebox.wire.types import (
    EARLIEST,
    LATEST,
    ActiveProducer,
    Appended,
    Broker,
    ClusterMetadata,
    CommittedOffset,
    Coordinator,
    DescribedGroup,
    GroupMember,
    ListedOffset,
    NativeTransaction,
    NativeTransactions,
    PartitionMetadata,
    PartitionProducers,
    ProducerIdentity,
    TopicMetadata,
    TopicPartition,
    TxnMarker,
)

__all__ = [
    "DEFAULT_TIMEOUT_MS",
    "EARLIEST",
    "FETCH_BACKOFF_MS",
    "LATEST",
    "OFFSETS_TOPIC",
    "ActiveProducer",
    "Appended",
    "AuthenticationError",
    "Broker",
    "ClusterMetadata",
    "CommittedOffset",
    "Compression",
    "Coordinator",
    "DescribedGroup",
    "ErrorCode",
    "GroupMember",
    "KafkaSettings",
    "ListedOffset",
    "NativeTransaction",
    "NativeTransactions",
    "OutcomeUnknownError",
    "PartitionMetadata",
    "PartitionProducers",
    "ProducerIdentity",
    "Record",
    "TopicMetadata",
    "TopicPartition",
    "TxnMarker",
    "UnsupportedRequestError",
    "Wire",
    "WireError",
    "aiokafka_options",
    "batch_builder",
    "encode_batch",
    "librdkafka_config",
    "offsets_partition",
    "sequence_after",
]
