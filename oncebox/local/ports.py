"""Free loopback ports. A port is only a suggestion until its server has bound it: callers retry when it was taken."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

HOST = "127.0.0.1"
# Below the range from which systems take the ports of outgoing connections: while a server is down between kill and
# restart, no client's connection (not even one to that very port) can take its place.
LOWEST, HIGHEST = 20_000, 32_767
TRIES = 1_000
CONNECT_TIMEOUT_S = 1.0


def free_ports(count: int) -> list[int]:
    """`count` different ports that nobody listens on now."""
    found: set[int] = set()
    random_ports = random.SystemRandom()
    for _ in range(TRIES):
        if len(found) == count:
            break
        port = random_ports.randint(LOWEST, HIGHEST)
        if is_free(port):
            found.add(port)
    else:
        raise OSError(f"no {count} free ports between {LOWEST} and {HIGHEST} on {HOST}")
    return list(found)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do it: a connection of a former server in TIME_WAIT does not make the port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def is_listening(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
        return True
    return False
