"""What the coordinator asks of a Kafka cluster: that it is fit for exactly-once, and that our own topics are there.

`check_cluster` looks, `refuse` decides, `ensure_topics` creates. Only `ensure_topics` changes anything.
"""

from coordinator.cluster.checks import Report, check_cluster
from coordinator.cluster.findings import ClusterError, Finding, Severity, refuse, render
from coordinator.cluster.topics import OwnTopics, ensure_topics

__all__ = [
    "ClusterError",
    "Finding",
    "OwnTopics",
    "Report",
    "Severity",
    "check_cluster",
    "ensure_topics",
    "refuse",
    "render",
]
