"""`oncebox bench` itself: its options, what it writes, and what it says without a checkout."""

import importlib.util
import json
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from oncebox.cli import bench as command
from oncebox.cli.checkout import NoCheckoutError
from proof.bench import registry
from proof.bench.context import Context
from proof.bench.measure import Metric, Side, interleave
from proof.bench.result import Result


def steady(context: Context) -> Iterator[Result]:
    """Two sides that need no broker."""
    yield from interleave(
        [Metric(key="rate", name="steady/rate", unit="1/s", better="higher", target=1.0)],
        ours=Side(name="Oncebox", run=lambda: {"rate": 30.0}),
        peer=Side(name="peer", run=lambda: {"rate": 20.0}),
        rounds=context.rounds,
        progress=context.progress,
    )


def broken(context: Context) -> Iterator[Result]:
    """Fails after its first result."""
    yield from steady(context)
    raise OSError("disk full")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(registry, "BENCHES", {"steady": f"{__name__}:steady", "broken": f"{__name__}:broken"})

    def invoke(*args):
        monkeypatch.setattr(sys, "argv", ["oncebox", "bench", *args])
        return CliRunner().invoke(command.app, args)

    return invoke


def test_it_shows_a_table_and_tells_its_progress(run):
    shown = run("steady", "--quick")
    assert shown.exit_code == 0
    assert "steady/rate" in shown.stdout
    assert "1.5" in shown.stdout
    assert "cores" in shown.stdout
    assert "steady: round 3 of 3, Oncebox: 30 1/s" in shown.stderr


@pytest.mark.parametrize(("args", "rounds"), [([], 5), (["--quick"], 3), (["--quick", "--rounds", "7"], 7)])
def test_rounds(run, tmp_path, args, rounds):
    assert run("steady", "--json", str(tmp_path / "f.json"), *args).exit_code == 0
    assert json.loads((tmp_path / "f.json").read_text())[0]["rounds"] == rounds


def test_it_writes_json_plot_and_page(run, tmp_path):
    files = {"--json": tmp_path / "b.json", "--plot": tmp_path / "b.svg", "--markdown": tmp_path / "b.md"}
    args = [word for option, path in files.items() for word in (option, str(path))]
    assert run("steady", *args).exit_code == 0
    assert [path.exists() for path in files.values()] == [True] * 3
    page = files["--markdown"].read_text()
    assert "Two sides that need no broker." in page
    assert f"oncebox bench steady --json {files['--json']}" in page
    assert "![The ratios](b.svg)" in page


def test_all_runs_all_and_a_failure_keeps_the_results_before_it(run, tmp_path):
    shown = run("all", "--json", str(tmp_path / "f.json"))
    assert isinstance(shown.exception, OSError)
    assert shown.exit_code == 1
    assert len(json.loads((tmp_path / "f.json").read_text())) == 2


def test_a_page_is_of_a_whole_run(run, tmp_path):
    page, plot = tmp_path / "b.md", tmp_path / "b.svg"
    page.write_text("of the last run")
    shown = run("all", "--markdown", str(page), "--plot", str(plot))
    assert shown.exit_code == 1
    assert page.read_text() == "of the last run"
    assert not plot.exists()
    assert "steady/rate" in shown.stdout
    told = f"broken: failed: OSError('disk full'); {page} and {plot} not written: a page is of a whole run\n"
    assert shown.stderr.endswith(told)


def test_a_wrong_name_lists_the_benches(run):
    shown = run("stedy")
    assert shown.exit_code == 2
    assert "no bench stedy; there are steady, broken and all" in shown.stderr


@pytest.mark.parametrize("args", [["--rounds", "0"], ["--plot", "f.pdf"], ["--json", "."]])
def test_wrong_options_are_refused_before_anything_runs(run, args):
    shown = run("steady", *args)
    assert shown.exit_code == 2
    assert "round 1" not in shown.stderr


def test_without_a_checkout_it_says_so_in_one_sentence(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    shown = run("steady")
    assert isinstance(shown.exception, NoCheckoutError)
    assert (
        str(shown.exception) == "`oncebox bench` runs from a checkout of the project (make bench), not from the package"
    )
