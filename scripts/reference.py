"""Writes docs/reference from the code: settings, metrics, errors and the gRPC API. With --check: compares.

Settings are documented by the comments above their fields, errors by their docstrings, calls by the .proto files.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

import oncebox
from coordinator.api.errors import STATUS
from coordinator.telemetry import CATALOGUE, PREFIX
from oncebox import errors
from oncebox.settings import NESTED, ServiceSettings, Variable
from oncebox.v1 import transaction_pb2

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
PROTOS = ("coordinator", "admin", "gateway", "relay", "manifest", "transaction")
HEAD = "<!-- Written by scripts/reference.py: change the code, then run it. -->"

ABOUT_CONFIG = """\
Each service reads a YAML file (`--config`), environment variables and flags. A flag wins over a variable, a variable
over the file, the file over the default. `${NAME}` in the file stands for a variable. A name that is unknown, misspelt
or contradicts another is refused at the start, with its place. Secrets are never printed."""
ABOUT_METRICS = """\
The coordinator's are at `http://HOST:7172/metrics` in Prometheus' text format, with those of the process
(`process_*`). No label holds a transactional id. Alerts are in `deploy/prometheus/alerts.yaml`, dashboards in
`deploy/grafana`."""
ABOUT_OTHER_METRICS = """\
The relay (`http://HOST:7182/metrics`), the outbox, and what a reconciliation leaves in its metrics file:"""
ABOUT_ERRORS = """\
Names and numbers are Kafka's own; from 10001 on ours. Unary calls carry the typed `oncebox.v1.Error` in
`grpc-status-details-bin`, streams carry it as a message; in Python each name has a class in `oncebox.errors`."""
ABOUT_PYTHON = """\
What `import oncebox` offers. `oncebox.blocking` has `Producer` with its transactions and `read_transactions` without
asyncio."""
ABOUT_PYTHON_ERRORS = """\
The others are in `oncebox.errors` ([errors](errors.md)), but for those of one function alone: `ReadError` and
`FeedTooShortError` in `oncebox.reader`, `PendingError`, `InDoubtError` and `TornError` in `oncebox.atomic_commit`,
`ProcessFailedError` in `oncebox.transform_processes`."""
ABOUT_API = """\
The contract is the `.proto` files, which the package holds too (`oncebox/protos`). Generate a client for your language
from them; every call is safe to repeat. Python users import `oncebox` and need none of this."""

ABOUT_PYTHON = """\
What `import oncebox` offers. `oncebox.blocking` has `Producer` and `read_transactions` without asyncio; `atomic` and
`recover` take either."""


def main() -> None:
    pages = {
        "config.md": config(),
        "metrics.md": metrics(),
        "errors.md": error_names(),
        "api.md": api(),
        "python.md": python(),
    }
    if "--check" in sys.argv:
        stale = [
            name for name, text in pages.items() if not (PAGES / name).exists() or (PAGES / name).read_text() != text
        ]
        sys.exit(f"docs/reference/{stale[0]} is stale: run scripts/reference.py" if stale else None)
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (PAGES / name).write_text(text)


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    escaped = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *escaped])


# --- settings --------------------------------------------------------------------------------------------------------


def config() -> str:
    parts = [
        HEAD,
        "# Settings",
        "",
        ABOUT_CONFIG,
    ]
    for model in sorted(_models(), key=lambda each: each.__module__):
        prefix = model.model_config.get("env_prefix", "")
        parts += ["", f"## {model.__name__.removesuffix('Settings')}", "", f"Variables begin with `{prefix}`.", ""]
        parts.append(_table(("setting", "variable", "type", "default", "meaning"), _settings(model, prefix, ())))
    return "\n".join(parts) + "\n"


def _models() -> list[type[ServiceSettings]]:
    for package in ("coordinator", "relay", "spark_jobs"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if "(ServiceSettings)" in file.read_text():
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return [each for each in ServiceSettings.__subclasses__() if not each.__module__.startswith("tests.")]


def _settings(model: type[BaseModel], prefix: str, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    comments = _comments(model)
    for name, info in model.model_fields.items():
        inner = _section(info.annotation)
        where = (*place, name)
        if inner is not None:
            is_many = get_origin(info.annotation) in {list, tuple, dict}
            told = _explained(model, name, comments.get(name) or " ".join((inner.__doc__ or "").split()))
            yield f"`{'.'.join(where)}`", "-", "list" if is_many else "section", "-", told
            # Of a list there is no variable for each: it stands in the file.
            yield from _settings(inner, "" if is_many else prefix, (*where, "…") if is_many else where)
            continue
        shared = [mark.name for mark in info.metadata if isinstance(mark, Variable)]
        own = [(prefix + NESTED.join(where)).upper()] if prefix else []
        variable = " or ".join(f"`{each}`" for each in [*shared, *own]) or "-"
        default = "needed" if info.is_required() else _default(info.get_default(call_default_factory=True))
        told = _explained(model, name, comments.get(name, ""))
        yield f"`{'.'.join(where)}`", variable, _type(info.annotation), default, told


def _explained(model: type[BaseModel], name: str, text: str) -> str:
    if not text:
        sys.exit(f"{model.__module__}.{model.__name__}.{name}: say in a comment above it what it means")
    return text


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _default(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if value or isinstance(value, int) else "empty"


def _type(given: Any) -> str:
    annotation = _bare(given)
    text = str(annotation) if not isinstance(annotation, type) else annotation.__name__
    # Not with what checks them: that has an address in memory.
    text = re.sub(r"Annotated\[(\w+), [^\[\]]*\]", r"\1", text)
    if "SecretStr" in text or annotation is SecretStr:
        return "secret"
    if "Literal" in text:
        return re.sub(r".*Literal\[(.*?)\].*", r"\1", text).replace("'", "")
    if "FilePath" in text or "Path" in text:
        return "file"
    if get_origin(annotation) in {list, tuple, frozenset, set}:
        return "list"
    return text.replace(" | None", "").replace("typing.", "")


def _bare(annotation: Any) -> Any:
    """Without what checks it, and without None."""
    if get_origin(annotation) is Annotated:
        return _bare(annotation.__origin__)
    kinds = [each for each in get_args(annotation) if each is not NoneType]
    return _bare(kinds[0]) if get_origin(annotation) in {Union, UnionType} and len(kinds) == 1 else annotation


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """What the comments right above a field say; also of the models that this one builds on."""
    found: dict[str, str] = {}
    for kind in reversed([each for each in model.__mro__ if issubclass(each, BaseModel) and each is not BaseModel]):
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            continue
        lines = source.splitlines()
        for node in ast.parse(textwrap.dedent(source)).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above: list[str] = []
                row = node.lineno - 2
                while row >= 0 and lines[row].strip().startswith("#"):
                    above.insert(0, lines[row].strip().removeprefix("#").strip())
                    row -= 1
                found[node.target.id] = " ".join(above)
    return found


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics() -> str:
    rows = ((f"`{_exposed(each)}`", each.kind, ", ".join(each.labels) or "-", each.help) for each in CATALOGUE)
    others = ((f"`{name}`", kind, help_text) for name, kind, help_text in other_metrics())
    return "\n".join(
        [
            HEAD,
            "# Metrics",
            "",
            ABOUT_METRICS,
            "",
            _table(("metric", "kind", "labels", "meaning"), rows),
            "",
            ABOUT_OTHER_METRICS,
            "",
            _table(("metric", "kind", "meaning"), others),
            "",
        ]
    )


def other_metrics() -> Iterator[tuple[str, str, str]]:
    """Of the services that name theirs where they count: found in their code."""
    relay = (ROOT / "relay/server.py").read_text()
    for family, name, told in re.findall(r'(Gauge\w+\()?"(oncebox_relay_\w+)", "([^"]+)"', relay):
        yield (name, "gauge", told) if family else (f"{name}_total", "counter", told)
    outbox = (ROOT / "relay/outbox/metrics.py").read_text()
    for kind, name, told in re.findall(r'self\._(counter|gauge)\("(\w+)", "([^"]+)"', outbox):
        yield f"oncebox_outbox_{name}{'_total' if kind == 'counter' else ''}", kind, told
    yield "oncebox_outbox_state", "gauge", "1 for the state it is in."
    publish = (ROOT / "spark_jobs/publish.py").read_text()
    for name, told in re.findall(r'gauge\("(\w+)", "([^"]+)"', publish):
        yield f"oncebox_reconcile_{name}", "gauge", told


def _exposed(metric: Any) -> str:
    return PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")


# --- errors ----------------------------------------------------------------------------------------------------------


def error_names() -> str:
    comments = _proto_comments((ROOT / "protos/oncebox/v1/transaction.proto").read_text())
    classes = {code: kind for code, kind in errors._CLASSES.items()}  # noqa: SLF001, C416 - the table itself

    def rows() -> Iterator[tuple[str, ...]]:
        for name, number in sorted(transaction_pb2.ErrorCode.items(), key=lambda each: each[1]):
            if not number:
                continue
            kind = classes.get(number)
            status = STATUS[number].name if number in STATUS else "-"
            cause = (kind.__doc__ if kind and "__doc__" in vars(kind) and kind.__doc__ else "") or comments.get(
                name, ""
            )
            cure = getattr(kind, "advice", "")
            yield f"`{name}` ({number})", status, f"`{kind.__name__}`" if kind else "-", _next_step(kind), cause, cure

    return "\n".join(
        [
            HEAD,
            "# Errors",
            "",
            ABOUT_ERRORS,
            "",
            _table(("error", "gRPC status", "Python", "then", "cause", "cure"), rows()),
            "",
            "Errors of the client alone:",
            "",
            _table(("Python", "then", "cause", "cure"), _client_errors(set(classes.values()))),
            "",
        ]
    )


def _next_step(kind: type[Exception] | None) -> str:
    if kind is None:
        return "-"
    for base, step in (
        (errors.RetriableError, "make the call again"),
        (errors.AbortableError, "abort, go on with the next transaction"),
        (errors.FatalError, "start a new producer, or stop"),
    ):
        if issubclass(kind, base):
            return step
    return "mend the call"


def _client_errors(told: set[type[Exception]]) -> Iterator[tuple[str, ...]]:
    for name, kind in sorted(vars(errors).items()):
        is_ours = isinstance(kind, type) and issubclass(kind, errors.OnceboxError) and kind not in told
        if is_ours and kind.__doc__ and not issubclass(kind, errors.CoordinatorError):
            yield f"`{name}`", _next_step(kind), " ".join(kind.__doc__.split()), kind.advice


# --- the API ---------------------------------------------------------------------------------------------------------


def _proto_comments(text: str) -> dict[str, str]:
    """Of enum values and calls: the comment lines right above."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            above.append(stripped.removeprefix("//").strip())
            continue
        named = re.match(r"(?:rpc )?(\w+)(?: = \d+;|\()", stripped)
        if named and above:
            found[named[1]] = " ".join(above)
        above = []
    return found


def api() -> str:
    parts = [
        HEAD,
        "# API",
        "",
        ABOUT_API,
    ]
    for name in PROTOS:
        text = (ROOT / f"protos/oncebox/v1/{name}.proto").read_text()
        comments = _proto_comments(text)
        about = " ".join(line.removeprefix("//").strip() for line in text.split("syntax")[0].splitlines())
        parts += ["", f"## {name}.proto", "", about]
        rows = [
            (f"`{call}`", f"`{asked}` → `{answered}`", comments.get(call, ""))
            for call, asked, answered in re.findall(r"rpc (\w+)\(([\w ]+)\) returns \(([\w ]+)\)", text)
        ]
        if rows:
            parts += ["", _table(("call", "messages", "what it does"), iter(rows))]
    return "\n".join(parts) + "\n"


# --- Python ----------------------------------------------------------------------------------------------------------


def python() -> str:
    parts = [HEAD, "# Python", "", ABOUT_PYTHON]
    for name in sorted(oncebox._HOMES):  # noqa: SLF001 - the list of what is offered
        offered = getattr(oncebox, name)
        if offered is errors.OnceboxError:
            parts += ["", f"## `{name}`", "", f"{_told(offered)} {ABOUT_PYTHON_ERRORS}"]
            continue
        if inspect.isclass(offered) and issubclass(offered, Enum):
            parts += ["", f"## `{name}`", "", ", ".join(f"`{each}`" for each in offered.__members__)]
            continue
        parts += ["", f"## `{name}`", "", f"`{name}{_signature(offered)}`", "", _told(offered)]
        if not inspect.isclass(offered):
            continue
        for method, value in vars(offered).items():
            if method.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
                continue
            shown = method if isinstance(value, property) else f"{method}{_signature(value)}"
            told = " ".join(_told(value).split())
            parts.append(f"- `{shown}`" + (f": {told}" if told else ""))
    return "\n".join(parts) + "\n"


def _told(offered: Any) -> str:
    told = inspect.getdoc(offered) or ""
    # A dataclass without a docstring gets its signature for one.
    return "" if told.startswith(f"{getattr(offered, '__name__', '')}(") else told


def _signature(offered: Any) -> str:
    """Names and plain defaults: types are in the code, and print differently from one Python to the next."""
    shown: list[str] = []
    star = False
    for parameter in inspect.signature(offered).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            shown.append("*")
        default = parameter.default
        plain = default is None or isinstance(default, bool | int | float | str | bytes | tuple)
        value = "" if default is parameter.empty else f"={default!r}" if plain else "=…"
        if isinstance(default, Enum):
            value = f"={type(default).__name__}.{default.name}"
        shown.append(parameter.name + value)
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    main()
