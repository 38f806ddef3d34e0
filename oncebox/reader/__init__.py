"""Whole committed transactions for readers: what Kafka's read_committed hides, the commit manifests tell.

assembly, order, express and lanes are pure; source.py reads Kafka; reader.py joins them into read_transactions().
"""

from oncebox.reader.lanes import Bulk
from oncebox.reader.reader import TransactionReader, read_transactions
from oncebox.reader.types import (
    CommittedTransaction,
    FeedTooShortError,
    PartitionPosition,
    Position,
    ReadError,
    Record,
)

__all__ = [
    "Bulk",
    "CommittedTransaction",
    "FeedTooShortError",
    "PartitionPosition",
    "Position",
    "ReadError",
    "Record",
    "TransactionReader",
    "read_transactions",
]
