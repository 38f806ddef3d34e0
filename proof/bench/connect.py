"""Kafka Connect, standalone, with one connector: how the peers that are connectors are run.

Jars come by their Maven coordinates, once per machine. Everything that is not the connector's own is the same for all.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from oncebox.local.jars import cache_folder, resolve
from oncebox.local.java import find_java
from proof.faults.process import ChildProcess

CONNECT_VERSION = "4.3.1"
COORDINATES = (
    f"org.apache.kafka:connect-runtime:{CONNECT_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",  # without it Connect logs nothing
)


def connector_jars(name: str, coordinates: Sequence[str], hashes: Path | None = None) -> Path:
    """The folder with Connect and a connector; downloaded at the first call on a machine."""
    folder = cache_folder() / f"connect-{CONNECT_VERSION}-{name}"
    return resolve((*COORDINATES, *coordinates), folder, hashes=hashes)


@contextmanager
def connect(
    folder: Path, jars: Path, *, servers: str, worker: Mapping[str, str], connector: Mapping[str, str]
) -> Iterator[ChildProcess]:
    """Runs until the block is left. `worker` and `connector` are added to what all have."""
    name = f"connect-{uuid.uuid4().hex[:6]}"
    settings = {
        "worker": {
            "bootstrap.servers": servers,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "offset.storage.file.filename": str(folder / f"{name}.offsets"),
            "listeners": "http://127.0.0.1:0",
            **worker,
        },
        "connector": {"name": name, **connector},
    }
    files = []
    for what, values in settings.items():
        files.append(folder / f"{name}-{what}.properties")
        files[-1].write_text("".join(f"{key}={value}\n" for key, value in values.items()))
    java = str(Path(find_java()) / "bin" / "java")
    command = [java, "-Xms512m", "-Xmx1g", "-cp", f"{jars}/*", "org.apache.kafka.connect.cli.ConnectStandalone"]
    with ChildProcess([*command, *map(str, files)], log=folder / f"{name}.log") as process:
        yield process
