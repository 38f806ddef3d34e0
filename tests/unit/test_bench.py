"""The frame of the bench: arithmetic, turns, warm-up, and the four forms of a report."""

import json
import struct
import threading
from contextlib import contextmanager
from io import StringIO

import psycopg
import pytest
from rich.console import Console

from oncebox import local
from proof.bench import context, machine, registry, report
from proof.bench.measure import Metric, Side, fixed, interleave
from proof.bench.missed import WHY
from proof.bench.peer_confluent import measure, percentile
from proof.bench.result import Result, ratio, reached, spread, to_json

RATE = Metric(key="rate", name="kafka/rate", unit="commits/s", better="higher", target=1.5)
LATENCY = Metric(key="latency", name="kafka/latency", unit="ms", better="lower")


def result(name: str = "kafka/rate", target: float | None = 1.0, **changes) -> Result:
    values = {"unit": "commits/s", "better": "higher", "ours": (200.0, 100.0, 300.0), "peer": (100.0, 100.0, 120.0)}
    values |= {"ours_name": "Oncebox", "peer_name": "confluent-kafka"}
    return Result(name=name, target=target, **(values | changes))


def test_ratio_divides_the_medians_and_spreads_over_the_rounds():
    found = ratio(result())
    assert (found.median, found.low, found.high) == (2.0, 1.0, 2.5)


def test_ratio_is_higher_where_a_lower_figure_is_better():
    faster = result(better="lower", ours=(2.0,), peer=(6.0,))
    assert ratio(faster).median == 3.0


def test_spread():
    found = spread((3.0, 1.0, 2.0, 10.0))
    assert (found.low, found.median, found.high) == (1.0, 2.5, 10.0)


def test_reached():
    assert reached(result(target=2.0)) is True
    assert reached(result(target=2.1)) is False
    assert reached(result(target=None)) is None


def test_json_of_a_result():
    told = to_json(result(name="coordinator/32-producers"))
    assert told == {
        "name": "coordinator/32-producers",
        "ours": 200.0,
        "peer": 100.0,
        "ratio": 2.0,
        "unit": "commits/s",
        "better": "higher",
        "target": 1.0,
        "rounds": 3,
        "ours_name": "Oncebox",
        "peer_name": "confluent-kafka",
        "ours_spread": [100.0, 300.0],
        "peer_spread": [100.0, 120.0],
        "ratio_spread": [1.0, 2.5],
    }


class Turns:
    """Sides that note when they run, with the rates they are given."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def side(self, name: str, rates: list[float]) -> Side:
        left = iter(rates)

        def run() -> dict[str, float]:
            self.noted.append(name)
            rate = next(left)
            return {"rate": rate, "latency": 1000 / rate}

        return Side(name=name, run=run)


def test_ours_and_peer_take_turns_and_the_warm_up_does_not_count():
    turns = Turns()
    told: list[str] = []
    found = interleave(
        [RATE, LATENCY],
        ours=turns.side("ours", [1, 20, 30]),
        peer=turns.side("peer", [1, 10, 10]),
        rounds=2,
        progress=told.append,
        warm_up_turns=1,
    )
    assert turns.noted == ["ours", "peer"] * 3
    assert [(each.name, each.ours, each.peer) for each in found] == [
        ("kafka/rate", (20, 30), (10, 10)),
        ("kafka/latency", (50, 1000 / 30), (100, 100)),
    ]
    assert told[0] == "warming up ours and peer"
    assert told[-1] == "round 2 of 2, peer: 10 commits/s, 100 ms"


@pytest.mark.parametrize(
    ("metric", "ours", "peer", "turns"),
    [
        (RATE, [10, 10, 10], [10, 10, 10], 3),
        (RATE, [10, 20, 21, 20], [10, 10, 10, 10], 4),
        (RATE, [10, 10, 10, 10], [10, 20, 19, 20], 4),
        (RATE, [10, 5, 10], [10, 10, 10], 3),
        # One slow turn on the way.
        (RATE, [10, 10, 20, 20, 20], [10, 10, 10, 10, 10], 5),
        (RATE, [2**turn for turn in range(14)], [1] * 14, 12),
        (LATENCY, [10, 20, 21, 20], [10, 10, 10, 10], 4),
    ],
)
def test_warm_up_goes_on_while_a_side_gets_better(metric, ours, peer, turns):
    counted = Turns()
    rates = [*ours[:turns], 77], [*peer[:turns], 77]
    found = interleave(
        [metric],
        ours=counted.side("ours", rates[0]),
        peer=counted.side("peer", rates[1]),
        rounds=1,
        progress=lambda _: None,
    )
    assert len(counted.noted) == 2 * (turns + 1)
    assert found[0].ours == found[0].peer != ()


def test_without_a_peer_the_target_is_the_peer():
    found = interleave(
        [RATE],
        ours=Turns().side("Oncebox", [50, 50, 50, 60, 70]),
        peer=fixed({"rate": 100.0}),
        rounds=2,
        progress=lambda _: None,
    )[0]
    assert found.peer_name == "target"
    assert found.peer == (100.0, 100.0)
    assert ratio(found).median == 0.65


def test_percentile_is_a_measured_value():
    ordered = [float(value) for value in range(1, 201)]
    assert percentile(ordered, 50) == 101.0
    assert percentile(ordered, 99) == 199.0
    assert percentile([7.0], 99) == 7.0


def test_producers_begin_together_and_set_up_is_not_measured():
    ready = threading.Barrier(4)
    made: list[int] = []

    @contextmanager
    def producer(number):
        made.append(number)
        ready.wait(30)  # a producer that ran before the others were there would hang here
        yield lambda: None

    found = measure(producer, producers=4, duration_s=0.05)
    assert sorted(made) == [0, 1, 2, 3]
    assert found.units_per_s > 0
    assert 0 <= found.p50_ms <= found.p99_ms


def test_a_producer_that_fails_to_start_does_not_leave_the_others_waiting():
    @contextmanager
    def producer(number):
        if number == 1:
            raise ValueError("no broker")
        yield lambda: None

    with pytest.raises(ValueError, match="no broker"):
        measure(producer, producers=3, duration_s=0.05)


def test_every_bench_can_be_loaded_and_says_what_it_measures():
    for name in registry.BENCHES:
        bench = registry.find(name)
        assert bench.__doc__, name


def test_the_users_brokers_are_used_where_named(monkeypatch):
    monkeypatch.setenv("ONCEBOX_BOOTSTRAP_SERVERS", "mine:9092")
    with context.Context(quick=True, rounds=1, duration_s=1) as given:
        assert given.bootstrap_servers == "mine:9092"
        assert given.parts == {"Kafka": "mine:9092"}


def test_the_machine_is_described():
    told = machine.describe()
    assert int(told["cores"]) >= 1
    assert told["Python"].startswith("3.")
    assert "confluent-kafka" in told["packages"]
    assert all(told.values())


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.05678, "0.0568"), (1.5, "1.5"), (99.94, "99.9"), (1234567.8, "1,234,568")]
)
def test_numbers(value, text):
    assert report.number(value) == text


def test_table_fits_a_terminal_and_shows_what_is_missed():
    output = StringIO()
    console = Console(width=80, file=output)
    results = [
        result(name="coordinator/32-producers"),
        result(name="coordinator/32-producers-p99", better="lower", unit="ms", target=1.0),
        result(name="ids/load", target=None, ours=(31_234.0,) * 3, peer=(60_000.0,) * 3, peer_name="target"),
    ]
    console.print(report.table(results, 3))
    text = output.getvalue()
    for wanted in (
        "coordinator/32-producers",
        "Oncebox against",
        "200",
        "(100..300)",
        "2",
        "(1..2.5)",
        "31,234",
        "missed",
    ):
        assert wanted in text
    assert "…" not in text


def test_json_file_is_a_list(tmp_path):
    report.write_json([result(), result(name="kafka/other")], tmp_path / "bench.json")
    read = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in read] == ["kafka/rate", "kafka/other"]
    assert read[0] == json.loads(json.dumps(to_json(result())))


@pytest.mark.parametrize("ours", [(2.0, 2.0, 2.0), (0.001, 0.002, 0.003)])
def test_plot(tmp_path, ours):
    results = [result(), result(name="kafka/missed", target=9.0), result(name="kafka/free", target=None, ours=ours)]
    report.write_plot(results, tmp_path / "bench.png")
    header = (tmp_path / "bench.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:])
    assert header.startswith(b"\x89PNG")
    assert width > height > 100
    report.write_plot(results, tmp_path / "bench.svg")
    assert "<svg" in (tmp_path / "bench.svg").read_text()


def test_markdown_page(tmp_path):
    page = tmp_path / "docs" / "bench.md"
    report.write_markdown(
        [result(), result(name="relay/rows", unit="rows/s", target=3.0)],
        page,
        explained={"kafka": "What Kafka does.", "relay": "What the relay does."},
        why={"kafka/rate": "it is not.", "relay/rows": "it is hard."},
        machine={"cores": "2", "Kafka": "4.3.1"},
        command="oncebox bench all --quick --markdown docs/bench.md",
        rounds=3,
        plot=tmp_path / "docs" / "images" / "bench.svg",
    )
    lines = page.read_text().splitlines()
    assert "Written by `oncebox bench all --quick --markdown docs/bench.md`, never by hand" in lines[2]
    assert "- cores: 2" in lines
    assert "![The ratios](images/bench.svg)" in lines
    assert lines.index("## kafka") < lines.index("What Kafka does.") < lines.index("## relay")
    against = "Oncebox against confluent-kafka"
    assert f"| kafka/rate | {against} | 200 (100..300) | 100 (100..120) | commits/s | 2 (1..2.5) | 1 |" in lines
    assert f"| relay/rows | {against} | 200 (100..300) | 100 (100..120) | rows/s | 2 (1..2.5) | 3 missed |" in lines
    assert "Why relay/rows is missed: it is hard." in lines
    assert "it is not." not in page.read_text()


def test_a_row_of_another_number_of_rounds_says_so(tmp_path):
    once, more = result(ours=(2.0,), peer=(1.0,)), result(ours=(2.0,) * 9, peer=(1.0,) * 9)
    output = StringIO()
    Console(width=200, file=output).print(report.table([result(), once, more], 3))
    page = tmp_path / "bench.md"
    report.write_markdown(
        [result(), once, more], page, explained={"kafka": "It."}, why={}, machine={}, command="bench", rounds=3
    )
    for told in (output.getvalue(), page.read_text()):
        assert told.count("confluent-kafka, 1 figure ") == 1
        assert told.count("confluent-kafka, 9 figures ") == 1
        assert told.count("confluent-kafka, ") == 2
    assert "median of 3 rounds" in page.read_text()


def test_the_report_tells_of_each_database_whether_it_waits_for_the_disk(monkeypatch):
    class Server:
        """Stands in for LocalPostgres, and for a connection to it."""

        dsn = "server"

        def __init__(self, _folder, *, settings):
            self.fsync = (settings or {}).get("fsync", "on")

        def __enter__(self):
            servers.append(self)
            return self

        def __exit__(self, *_):
            pass

        def dsn_of(self, name):
            return name

        def execute(self, _asked):
            return self

        def fetchall(self):
            return [("18.4", self.fsync)]

    servers: list[Server] = []
    monkeypatch.setattr(local, "LocalPostgres", Server)
    monkeypatch.setattr(psycopg, "connect", lambda _dsn, **_: servers[-1])
    with context.Context(quick=True, rounds=1, duration_s=1, progress=lambda _: None) as given:
        given.new_database()
        with given.postgres("PostgreSQL, atomic"):
            pass
    assert given.parts == {
        "PostgreSQL": "18.4, fsync off, on this machine",
        "PostgreSQL, atomic": "18.4, fsync on, on this machine",
    }


def test_whys_are_of_benches_that_there_are():
    assert {name.partition("/")[0] for name in WHY} <= registry.BENCHES.keys()
