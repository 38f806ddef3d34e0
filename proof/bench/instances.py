"""Coordinator instances as processes, for whoever measures or disturbs them."""

import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import grpc

from oncebox.v1 import admin_pb2, admin_pb2_grpc
from proof.faults.process import ChildProcess, http_ok

READY_S = 300.0
POLL_S = 0.2


class Coordinator:
    """One instance; on a log of its own unless the environment names one."""

    def __init__(self, bootstrap_servers: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        suffix = uuid.uuid4().hex[:8]
        self.process = ChildProcess(
            [sys.executable, "-m", "coordinator"],
            log=folder / f"coordinator-{suffix}.log",
            environment={
                "ONCEBOX_BOOTSTRAP_SERVERS": bootstrap_servers,
                "ONCEBOX_COORDINATOR_LISTEN_PORT": "0",
                "ONCEBOX_COORDINATOR_HTTP_PORT": "0",
                **on_log(suffix),
                **(environment or {}),
            },
        )
        self.address = ""
        self.pages = ""  # where /live, /ready and /metrics are

    def __enter__(self) -> Self:
        self.process.start()
        self.process.wait_ready(lambda: self.process.log_contains(r"serves at .*\n"), timeout_s=READY_S)
        told = re.search(r"serves at (\S+), health (\d+)", self.process.log.read_text())
        if told is None:
            raise RuntimeError(self.process.log_tail())
        self.address, port = told.groups()
        self.pages = f"http://127.0.0.1:{port}"
        self.process.wait_ready(lambda: http_ok(f"{self.pages}/ready"), timeout_s=READY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()


def on_log(suffix: str) -> dict[str, str]:
    """The environment of instances that share the log of this name."""
    return {
        "ONCEBOX_COORDINATOR_LOG_TOPIC": f"oncebox.log.{suffix}",
        "ONCEBOX_COORDINATOR_FEED_TOPIC": f"oncebox.commits.{suffix}",
    }


def leaders(address: str) -> dict[int, str]:
    """Log partition → address of the instance that serves it, as one instance knows."""
    with grpc.insecure_channel(address) as channel:
        request = admin_pb2.ListLeadersRequest()
        listed = admin_pb2_grpc.AdminStub(channel).ListLeaders(request, timeout=READY_S).leaders
    return {leader.log_partition: leader.address for leader in listed if leader.state == "serving"}


def wait_until_shared(addresses: Sequence[str], partitions: int) -> dict[int, str]:
    """Until every partition is served, all lead as many as each other, give or take one, and all of them know it; who
    leads what.
    """
    deadline_s = time.monotonic() + READY_S
    while True:
        led, *others = (leaders(address) for address in addresses)
        counts = Counter(led.values())
        shared = set(counts) == set(addresses) and max(counts.values()) - min(counts.values()) <= 1
        if len(led) == partitions and shared and all(other == led for other in others):
            return led
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {READY_S:g} s the partitions are led by {dict(counts)}")
        time.sleep(POLL_S)
