"""What the examples share: where Kafka and the coordinator are, and topics to write to."""

import argparse
import os


def arguments(description: str) -> argparse.Namespace:
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    servers = os.environ.get("ONCEBOX_BOOTSTRAP_SERVERS", "localhost:9092")
    parser.add_argument("--kafka", default=servers, help="brokers as host:port (%(default)s)")
    parser.add_argument("--coordinators", default="localhost:7171", help="coordinators as host:port (%(default)s)")
    parser.add_argument("--feed", default="oncebox.commits", help="the coordinators' feed topic (%(default)s)")
    parser.add_argument("--prefix", default="example", help="of the names of topics, groups and ids (%(default)s)")
    parser.add_argument("--count", type=int, default=100, help="how much to do (%(default)s)")
    return parser


def create_topics(kafka: str, *topics: str, partitions: int = 3) -> None:
    """Those that do not exist yet."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": kafka})
    missing = set(topics) - set(admin.list_topics(timeout=30).topics)
    if missing:
        for created in admin.create_topics([NewTopic(topic, partitions) for topic in missing]).values():
            created.result(30)
