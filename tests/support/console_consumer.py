"""A stock reader of another make: Kafka's own console consumer, in Java."""

import re
import subprocess

from oncebox.local.jars import kafka_jars
from oncebox.local.java import find_java

# Whatever the producers of a Ledger write, committed or not.
RECORD = re.compile(rb"p\d-[0-9a-f]{6}/\d+|never committed")


def java_console_consumer(bootstrap_servers: str, topic: str) -> list[bytes]:
    """Kafka's own kafka-console-consumer.sh --isolation-level read_committed."""
    done = subprocess.run(
        [
            f"{find_java()}/bin/java",
            "-Xmx128m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{kafka_jars()}/*",
            "org.apache.kafka.tools.consumer.ConsoleConsumer",
            *("--bootstrap-server", bootstrap_servers, "--topic", topic, "--from-beginning"),
            *("--isolation-level", "read_committed", "--timeout-ms", "20000"),
        ],
        capture_output=True,
        check=False,
        timeout=120,
    )
    # Its own log messages share the output.
    return [line for line in done.stdout.splitlines() if RECORD.fullmatch(line)]
