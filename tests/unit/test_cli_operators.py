"""Operators' commands as a person uses them: real processes, a real server, a pseudo-terminal to be asked on."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from coordinator.api.admin import TURN_IDS
from coordinator.core.commands import ErrorCode, Refused
from coordinator.core.records import Result
from coordinator.open_transactions import Found, Kind, Open, PartitionDescription, Unexamined
from oncebox.session import CONNECT_TIMEOUT_MS
from oncebox.wire import TopicPartition
from tests.support.listening import listening, pass_on
from tests.unit.api.bench import Bench, commit, eventually, settings_for_tests, written
from tests.unit.api.secure import Ground
from tests.unit.core.states import id_state

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ONCEBOX = str(Path(sys.executable).with_name("oncebox"))


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


async def run(bench: Bench | None, *args: str, **environment: str) -> Ran:
    known = {"ONCEBOX_COORDINATORS": bench.api.address} if bench else {}
    process = await asyncio.create_subprocess_exec(
        ONCEBOX,
        *args,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **known, **environment},
    )
    out, err = await asyncio.wait_for(process.communicate(), 180)
    return Ran(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(settings_for_tests())
    await bench.start()
    yield bench
    await bench.stop()


async def test_list(bench: Bench):
    for name in ("b", "a", "[bold]c"):
        await bench.begin(name)
    listed = await run(bench, "txn", "list")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.out.splitlines()[1:-1]] == ["[bold]c", "a", "b"]
    assert "orders:0,1" in listed.out
    assert listed.out.endswith("3 shown\n")
    rows = [json.loads(line) for line in (await run(bench, "txn", "list", "--json")).out.splitlines()]
    assert [(row["transactional_id"], row["state"]) for row in rows] == [
        ("[bold]c", "ONGOING"),
        ("a", "ONGOING"),
        ("b", "ONGOING"),
    ]
    assert rows[0]["partitions"] == [{"topic": "orders", "partitions": [0, 1]}]
    first = await run(bench, "txn", "list", "--limit", "2")
    assert first.out.endswith("2 shown; more with --after 'a'\n")
    rest = await run(bench, "txn", "list", "--limit", "2", "--after", "a")
    assert rest.out.endswith("1 shown\n")
    assert (await run(bench, "txn", "list", "--state", "prepared")).out.endswith("0 shown\n")


async def test_a_hundred_thousand_ids_are_not_loaded_to_show_some(bench: Bench):
    state = id_state()
    names = [f"id-{number:06d}" for number in range(100_000)]
    pages: list[tuple[str, int]] = []

    def counted(prefix: str, after: str, limit: int) -> Any:
        pages.append((after, limit))
        start = bisect_right(names, max(prefix, after))
        return [replace(state, transactional_id=name) for name in names[start : start + limit]]

    bench.calls.page = counted  # type: ignore[method-assign]
    shown = await run(bench, "txn", "list", "--limit", "50", "--after", "id-050000", "--json")
    assert [json.loads(line)["transactional_id"] for line in shown.out.splitlines()] == [
        f"id-{number:06d}" for number in range(50_001, 50_051)
    ]
    assert len(pages) <= 2
    pages.clear()
    everything = await run(bench, "txn", "list", "--all")
    assert everything.out.count("\n") == 100_000
    assert max(limit for _, limit in pages) == TURN_IDS
    assert sum(limit for _, limit in pages) <= 100_000 + TURN_IDS


async def test_describe_and_outcome(bench: Bench):
    grant = await bench.begin("a")
    await bench.coordinator.End(commit(grant, written("orders", 0), transactional_id="a"))
    described = await run(bench, "txn", "describe", "a")
    assert described.code == 0
    assert "COMMITTED" in described.out
    assert "test at 127.0.0.1:" in described.out
    assert (await run(bench, "txn", "describe", "a", "--json")).json["outcomes"][0]["result"] == "COMMITTED"
    committed = await run(bench, "txn", "outcome", "a", str(grant.number))
    assert (committed.code, committed.out.split(" at ")[0]) == (0, f"a {grant.number}: COMMITTED")
    undecided = await run(bench, "txn", "outcome", "a", str(grant.number + 1), "--json")
    assert (undecided.code, undecided.json["result"]) == (4, "UNDECIDED")
    unknown = await run(bench, "txn", "describe", "nobody")
    assert (unknown.code, unknown.out) == (1, "")
    assert unknown.err.startswith("oncebox: INVALID_PRODUCER_ID_MAPPING")
    assert "Traceback" not in unknown.err


async def test_abort_needs_a_yes(bench: Bench):
    grant = await bench.begin("a")
    unasked = await run(bench, "txn", "abort", "a")
    assert unasked.code == 2
    assert "--yes" in unasked.err
    aborted = await run(bench, "txn", "abort", "a", "--yes")
    assert (aborted.code, aborted.out.split(" at ")[0]) == (0, f"a {grant.number}: ABORTED (ADMINISTRATOR)")
    assert (await run(bench, "txn", "outcome", "a", str(grant.number))).code == 3
    nothing = await run(bench, "txn", "abort", "a", "--yes")
    assert (nothing.code, nothing.err) == (1, "oncebox: a has no open transaction; it is EMPTY\n")
    await bench.begin("b")
    wrong = await run(bench, "txn", "abort", "b", "--number", "999", "--yes")
    assert wrong.code == 1


async def test_fence(bench: Bench):
    await bench.begin("a")
    assert (await run(bench, "txn", "abort", "a", "--fence", "--yes")).code == 0
    described = (await run(bench, "txn", "describe", "a", "--json")).json
    assert described["owner"]["cause"] == "ADMINISTRATOR"


@pytest.mark.parametrize(("typed", "state"), [(b"n\n", "ONGOING"), (b"y\n", "EMPTY"), (b"\x03", "ONGOING")])
async def test_abort_asks_on_a_terminal(bench: Bench, typed: bytes, state: str):
    await bench.begin("a")
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        ONCEBOX,
        *("txn", "abort", "a"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "ONCEBOX_COORDINATORS": bench.api.address, "TERM": "xterm"},
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(theirs)
    ending = asyncio.ensure_future(process.wait())
    seen = b""
    async with asyncio.timeout(120):
        while b"[y/N]" not in seen:
            seen += await asyncio.to_thread(os.read, ours, 1024)
        while process.returncode is None:
            # Python loses a Ctrl-C that comes between input()'s last look and its read: a person presses it again.
            os.write(ours, typed)
            await asyncio.wait([ending], timeout=5)
    os.close(ours)
    code = await ending
    assert b"End transaction" in seen
    assert (code == 0) == (typed == b"y\n")
    assert (await run(bench, "txn", "describe", "a", "--json")).json["state"] == state


def _own_terminal() -> None:
    """So that Ctrl-C reaches the command and not us; also where we were started to ignore it, as in the background."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def test_watch(bench: Bench):
    watching = asyncio.create_task(run(bench, "txn", "watch", "--prefix", "a", "--count", "2", "--json"))
    await eventually(lambda: bench.calls.watcher_count > 0, 60)
    await bench.begin("b")
    grant = await bench.begin("a")
    await bench.coordinator.End(commit(grant, written("orders", 0), transactional_id="a"))
    ran = await watching
    events = [json.loads(line)["transaction"] for line in ran.out.splitlines()]
    assert (ran.code, ran.err) == (0, "")
    assert [(event["transactional_id"], event["state"]) for event in events] == [
        ("a", "ONGOING"),
        ("a", "PREPARE_COMMIT"),
    ]


def opened(kind: Kind, **fields: Any) -> Open:
    known = {"topic": "orders", "partition": 0, "producer_id": 7, "epoch": 2, "coordinator_epoch": 1, "age_ms": 90_000}
    return Open(**{**known, "offset_first": 10, "kind": kind, **fields})


async def test_who_blocks(bench: Bench):
    free = await run(bench, "partition", "who-blocks", "orders:0")
    assert (free.code, free.out.splitlines()[-1]) == (0, "nobody blocks it")
    bench.hanging.described = PartitionDescription(
        offset_stable=10,
        offset_high_watermark=25,
        open=(opened(Kind.ONCEBOX, transactional_id="a", number=3), opened(Kind.HANGING, producer_id=8)),
    )
    blocked = await run(bench, "partition", "who-blocks", "orders:0")
    assert blocked.code == 3
    assert "readers stand at 10, 15 before the end at 25" in blocked.out
    assert "oncebox txn abort 'a'" in blocked.out
    assert "oncebox txn hanging --topic orders --end" in blocked.out
    found = (await run(bench, "partition", "who-blocks", "orders:0", "--json")).json
    assert [each["kind"] for each in found["open"]] == ["ONCEBOX", "HANGING"]
    bench.hanging.described = Refused(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message="orders:0 does not exist")
    assert (await run(bench, "partition", "who-blocks", "orders:0")).code == 1


async def test_hanging(bench: Bench):
    assert (await run(bench, "txn", "hanging")).code == 0
    hanging = (opened(Kind.HANGING, ends_as=Result.ABORTED),)
    bench.hanging.found = Found(hanging=hanging, unexamined=())
    found = await run(bench, "txn", "hanging", "--topic", "orders")
    assert (found.code, found.out.splitlines()[-1]) == (3, "1 hanging")
    assert (await run(bench, "txn", "hanging", "--end")).code == 2
    hanging = (opened(Kind.HANGING, ends_as=Result.ABORTED, ended=True),)
    bench.hanging.found = Found(hanging=hanging, unexamined=())
    ended = await run(bench, "txn", "hanging", "--end", "--yes")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "1 hanging, 1 ended")
    assert bench.hanging.asked[-1] == (frozenset(), True)
    there = Unexamined(TopicPartition("orders", 5), "it has no leader")
    bench.hanging.found = Found(hanging=(), unexamined=(there,))
    unclear = await run(bench, "txn", "hanging")
    assert (unclear.code, unclear.err) == (1, "not examined: orders:5, it has no leader\n")


async def test_leaders(bench: Bench):
    shown = await run(bench, "leaders")
    assert shown.code == 0
    assert len(shown.out.splitlines()) == 5
    assert [leader["log_partition"] for leader in (await run(bench, "leaders", "--json")).json] == [0, 1, 2, 3]


async def test_over_tls(tmp_path: Path):
    ground = Ground(tmp_path)
    async with ground.serving() as bench:
        pair = ground.authority.issue("operator")
        shown = {"ONCEBOX_CA": str(ground.authority.ca), "ONCEBOX_CERT": str(pair.certificate)}
        shown["ONCEBOX_KEY"] = str(pair.key)
        assert (await run(bench, "leaders", **shown)).code == 0
        plain = await run(bench, "leaders")
        assert plain.code == 1
        assert "--ca" in plain.err
        await bench.begin("a", topic="orders")
        denied = await run(bench, "txn", "abort", "a", "--yes", **shown)
        assert denied.code == 1
        assert denied.err.startswith("oncebox: CLUSTER_AUTHORIZATION_FAILED")


async def test_nobody_there():
    ran = await run(None, "txn", "list", "--coordinators", "127.0.0.1:1")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("oncebox: no coordinator answers at 127.0.0.1:1")


async def test_completion_knows_sub_commands():
    ran = await run(None, COMP_WORDS="oncebox txn ", COMP_CWORD="2", _ONCEBOX_COMPLETE="complete_bash")
    assert {"list", "describe", "abort", "outcome", "hanging", "watch"} <= set(ran.out.split())


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--ca", "absent.pem"], 1, "absent.pem: No such file"),
        (["--ca", __file__], 1, f"{__file__}: no certificate in PEM"),
        (["--cert", "mine.pem"], 2, "--cert and --key need each other"),
        (["--token-file", "absent"], 1, "--token-file absent is not there"),
    ],
)
async def test_credentials_that_cannot_be_used(bench: Bench, options: list[str], code: int, told: str):
    """Told by themselves, and not as a coordinator that does not answer."""
    ran = await run(bench, "leaders", *options)
    assert ran.code == code
    assert told in ran.err
    assert "Traceback" not in ran.err
    assert "ssl_transport" not in ran.err, "gRPC has a log of its own"


async def test_from_afar(bench: Bench):
    """Each way takes longer than a producer's first attempt to connect may."""
    host, port = bench.api.address.rsplit(":", 1)
    delay_s = 2 * CONNECT_TIMEOUT_MS / 1_000

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        both = (pass_on(reader, there_writer, delay_s=delay_s), pass_on(there_reader, writer, delay_s=delay_s))
        await asyncio.gather(*both)

    async with listening(relay) as far:
        found = await run(None, "txn", "describe", "nobody", "--coordinators", f"127.0.0.1:{far}")
        assert "of 'nobody'" in found.err, found.err


async def test_many_rows_are_no_table(bench: Bench):
    for number in range(1_500):
        name = f"id-{number:06d}"
        bench.calls.state.active[name] = replace(id_state(), transactional_id=name)
    listed = await run(bench, "txn", "list", "--limit", "1200")
    assert listed.out.count("\n") == 1_200
    assert listed.out.startswith("id-000000\t")
    assert listed.err == "1200 shown; more with --after 'id-001199'\n"
