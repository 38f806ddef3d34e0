"""Hosts of their own for parts of a run: Linux network namespaces on one bridge, between which packets can be lost.

All of it lies in a network of this process's own, so nothing of the machine's is touched, and nothing outlives us:
namespaces end with their last process. Needs root, iproute2 and util-linux.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import CDLL, get_errno
from types import TracebackType
from typing import Self

from oncebox.local.kafka_properties import Host
from oncebox.local.process import Guard

CLONE_NEWNET = 0x40000000
COMMANDS = ("ip", "nsenter", "unshare", "sleep")
TRIAL = "ip link add name bridge type bridge && ip link add name one type veth peer name other"
# Set aside for tests of networks (RFC 2544); nobody else is in ours.
NETWORK = "198.18.0"
# No host has this one: what is sent there comes nowhere, and nobody is told.
NOBODY = "02:00:00:00:00:00"
MOVE_S = 10.0
POLL_S = 0.02


class HostsError(Exception):
    """There are no hosts to be had, or one does not do what it is told."""


def obstacle() -> str | None:
    """Why there can be none here, if so."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "it takes root on Linux"
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"there is no {' and no '.join(missing)} (packages iproute2, util-linux, coreutils)"
    trial = subprocess.run(["unshare", "--net", "sh", "-c", TRIAL], capture_output=True, text=True, check=False)
    return f"this root may not make networks: {trial.stderr.strip()}" if trial.returncode else None


def enter_own_network() -> None:
    """Moves this process, with all that it starts from here on, into an empty network: of the machine's, nothing can be
    reached any more. Threads that run already would stay behind.
    """
    if threading.active_count() > 1:
        raise HostsError("other threads run already: they would stay in the machine's network")
    if CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise HostsError(f"no network of our own: {os.strerror(get_errno())}")
    _run(["ip", "link", "set", "lo", "up"])


class Hosts:
    """Some hosts, numbered from 0. Use as a context manager, within a network of our own; its calls block."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running = ExitStack()
        self._holders: list[int] = []
        self._lost: set[tuple[int, int]] = set()

    def __enter__(self) -> Self:
        guard = Guard()
        self._running.callback(guard.close)
        try:
            _run(["ip", "link", "add", "name", "hosts", "type", "bridge"])
            _run(["ip", "address", "add", f"{NETWORK}.1/24", "dev", "hosts"])
            _run(["ip", "link", "set", "hosts", "up"])
            for number in range(self._count):
                self._add(number, guard)
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()
        _run(["ip", "link", "delete", "hosts"])

    def _add(self, number: int, guard: Guard) -> None:
        # A namespace lasts as long as a process is in it.
        holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, process_group=guard.group()
        )
        self._running.callback(holder.wait)
        self._running.callback(holder.kill)
        self._holders.append(holder.pid)
        deadline_s = time.monotonic() + MOVE_S
        while _network(holder.pid) == _network(os.getpid()):
            if holder.poll() is not None or time.monotonic() > deadline_s:
                raise HostsError(f"host {number} did not come up")
            time.sleep(POLL_S)
        peer = f"host{number}"
        _run(["ip", "link", "add", "name", peer, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)])
        _run(["ip", "link", "set", peer, "master", "hosts", "up"])
        self._run_at(number, "ip", "address", "add", f"{address(number)}/24", "dev", "eth0")
        self._run_at(number, "ip", "link", "set", "eth0", "up")
        self._run_at(number, "ip", "link", "set", "lo", "up")

    def host(self, number: int) -> Host:
        return Host(address=address(number), enter=self._enter(number))

    def lose(self, sender: int, receiver: int) -> None:
        """From here on, what one sends to the other is lost, also on connections that they have; neither is told."""
        neighbour = [
            "ip",
            "neighbour",
            "replace",
            address(receiver),
            "lladdr",
            NOBODY,
            "nud",
            "permanent",
            "dev",
            "eth0",
        ]
        self._run_at(sender, *neighbour)
        self._lost.add((sender, receiver))

    def heal(self) -> None:
        """All packets arrive again."""
        while self._lost:
            sender, receiver = next(iter(self._lost))
            self._run_at(sender, "ip", "neighbour", "delete", address(receiver), "dev", "eth0")
            self._lost.discard((sender, receiver))

    def _enter(self, number: int) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self._holders[number]}/ns/net", "--")

    def _run_at(self, number: int, *command: str) -> None:
        _run([*self._enter(number), *command])


def address(number: int) -> str:
    return f"{NETWORK}.{number + 10}"


def _network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip()}")
