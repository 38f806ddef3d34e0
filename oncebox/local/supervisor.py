"""Runs the local parts for `oncebox local up`: starts them, stays with them, and ends them together, whatever happens.
`down` ends a run from another process. What the user has of his own is checked, never started or stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from oncebox.dsn import checked
from oncebox.local.errors import LocalError
from oncebox.local.kafka import LocalKafka, metadata_of
from oncebox.local.postgres import VERSION_MIN, LocalPostgres
from oncebox.local.state import Part, State, held, is_alive, is_held, read_state, start_time, write_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLL_S = 0.25
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DOWN_TIMEOUT_S = 60.0
KILLED_TIMEOUT_S = 20.0  # the watchdogs end what a killed run leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    folder: Path
    brokers: int
    secure: bool
    fresh: bool
    kafka: bool
    postgres: bool
    bootstrap_servers: str | None  # the user's own; None: start one
    dsn: str | None


def run(options: Options, progress: Callable[[str], None], on_ready: Callable[[State], None]) -> NoReturn:
    """Brings everything up, calls `on_ready`, and stays until it is told to end (SIGINT, SIGTERM, SIGHUP)."""
    for number in ENDING:
        signal.signal(number, _end)
    with ExitStack() as stack:
        stack.enter_context(held(options.folder))
        write_state(options.folder, _state(options, None, None, ready=False))
        if options.fresh:
            for part in ("kafka", "postgres"):
                if (options.folder / part).exists():
                    shutil.rmtree(options.folder / part)
        postgres = _postgres(options, stack, progress)
        kafka = _kafka(options, stack, progress)
        state = _state(options, kafka, postgres, ready=True)
        write_state(options.folder, state)
        on_ready(state)
        while True:
            _check_running(kafka, postgres)
            time.sleep(POLL_S)


def down(folder: Path) -> bool:
    """Ends what runs in the folder and waits for it; False when nothing ran."""
    if not is_held(folder):
        return False
    while (state := read_state(folder)) is None:  # it starts or ends at this moment
        if not is_held(folder):
            return True
        time.sleep(POLL_S)
    os.kill(state.pid, signal.SIGTERM)
    if not _ended(state, DOWN_TIMEOUT_S):
        os.kill(state.pid, signal.SIGKILL)
        if not _ended(state, KILLED_TIMEOUT_S):
            raise LocalError(
                f"some of {', '.join(f'{part.name} (pid {part.pid})' for part in state.parts)} did not end"
            )
    return True


def _ended(state: State, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    processes = [(state.pid, state.started), *((part.pid, part.started) for part in state.parts)]
    while any(is_alive(pid, started) for pid, started in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _end(_number: int, _frame: object) -> NoReturn:
    for number in ENDING:  # a second one must not interrupt the orderly end
        signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _postgres(options: Options, stack: ExitStack, progress: Callable[[str], None]) -> LocalPostgres | None:
    if options.dsn is not None:
        _check_dsn(options.dsn)
    elif options.postgres:
        return stack.enter_context(LocalPostgres(options.folder / "postgres", progress=progress))
    return None


def _kafka(options: Options, stack: ExitStack, progress: Callable[[str], None]) -> LocalKafka | None:
    if options.bootstrap_servers is not None:
        if metadata_of(options.bootstrap_servers) is None:
            raise LocalError(
                f"no Kafka answers at {options.bootstrap_servers}; "
                "without --bootstrap-servers and ONCEBOX_BOOTSTRAP_SERVERS one is started here"
            )
    elif options.kafka:
        kafka = LocalKafka(options.folder / "kafka", brokers=options.brokers, secure=options.secure, progress=progress)
        return stack.enter_context(kafka)
    return None


def _check_dsn(dsn: str) -> None:
    import psycopg

    checked(dsn)
    try:
        with psycopg.connect(dsn, connect_timeout=10) as connection:
            version = connection.info.server_version // 10_000
    except psycopg.Error as error:
        raise LocalError(
            f"no PostgreSQL at the DSN given: {str(error).strip()}; without --dsn and ONCEBOX_DSN one is started here"
        ) from None
    if version < VERSION_MIN:
        raise LocalError(f"the PostgreSQL given is version {version}; {VERSION_MIN} or newer is needed")


def _check_running(kafka: LocalKafka | None, postgres: LocalPostgres | None) -> None:
    if kafka is not None:
        kafka.check_running()
    if postgres is not None:
        postgres.check_running()


def _state(options: Options, kafka: LocalKafka | None, postgres: LocalPostgres | None, *, ready: bool) -> State:
    parts: list[Part] = []
    environment: dict[str, str] = {}
    if kafka is not None:
        parts += [
            _part(f"kafka broker {broker.node_id}", f"{kafka.host}:{broker.port}", broker.pid, broker.log_path)
            for broker in kafka.brokers
        ]
        environment["ONCEBOX_BOOTSTRAP_SERVERS"] = kafka.bootstrap_servers
        if options.secure:
            environment |= {
                "ONCEBOX_SECURE_BOOTSTRAP_SERVERS": kafka.secure_servers,
                "ONCEBOX_SECURE_USERNAME": kafka.username,
                "ONCEBOX_SECURE_PASSWORD": kafka.password,
                "ONCEBOX_SECURE_CA": str(kafka.ca_path),
            }
    elif options.bootstrap_servers is not None:
        parts.append(Part(name="kafka", address=options.bootstrap_servers, pid=None, started=None, log=None))
        environment["ONCEBOX_BOOTSTRAP_SERVERS"] = options.bootstrap_servers
    if postgres is not None:
        address = f"{postgres.host}:{postgres.port}"
        parts.append(_part("postgres", address, postgres.pid, postgres.log_path))
        environment["ONCEBOX_DSN"] = postgres.dsn
    elif options.dsn is not None:
        parts.append(Part(name="postgres", address="the DSN given", pid=None, started=None, log=None))
        environment["ONCEBOX_DSN"] = options.dsn
    pid = os.getpid()
    started = start_time(pid) or ""
    return State(pid=pid, started=started, ready=ready, parts=tuple(parts), environment=environment)


def _part(name: str, address: str, pid: int, log_path: Path) -> Part:
    return Part(name=name, address=address, pid=pid, started=start_time(pid), log=str(log_path))
