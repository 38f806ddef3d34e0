"""How the log lines of a service look: for people, or one JSON object a line. Transactions are named in fields of
their own, and secrets never stand in any of it, whoever put them there. Settings are read anew while a service runs.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr

from oncebox.settings import ServiceSettings, SettingsError

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=ServiceSettings)

FIELDS = ("transactional_id", "number", "producer_id", "epoch", "log_partition")
# What is shorter would blot out innocent text, and is no secret worth the name.
SECRET_MIN_CHARACTERS = 4
_BEARER = re.compile(r"(?i)(bearer\s+)[\w.~+/=-]+")
_IN_URL = re.compile(r"(\w+://[^\s:/@]*):[^\s@/]+@")
_IN_DSN = re.compile(r"(?i)(password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s'&\"]+)")
HIDDEN = "***"


class Formatter(logging.Formatter):
    def __init__(self, *, as_json: bool, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._as_json = as_json
        known = [each for each in secrets if len(each) >= SECRET_MIN_CHARACTERS]
        # As they are, and as a text that quotes them has them: repr() escapes quotes and backslashes.
        self._secrets = sorted({*known, *(repr(each)[1:-1] for each in known)}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        return self._json(record) if self._as_json else self._redacted(self._text(record))

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        return ((name, record.__dict__[name]) for name in FIELDS if record.__dict__.get(name))

    def _time(self, record: logging.LogRecord) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"

    def _text(self, record: logging.LogRecord) -> str:
        named = "".join(f" {name}={value!r}" for name, value in self._fields(record))
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{self._time(record)} {record.levelname} {record.name} {record.getMessage()}{named}{trace}"

    def _json(self, record: logging.LogRecord) -> str:
        line = {
            "time": self._time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **dict(self._fields(record)),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        # Blotted out before they are written as JSON, which has other characters for a quote in them.
        told = {name: value if isinstance(value, int) else self._redacted(str(value)) for name, value in line.items()}
        return json.dumps(told, ensure_ascii=False)

    def _redacted(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        line = _IN_DSN.sub(rf"\1{HIDDEN}", _BEARER.sub(rf"\1{HIDDEN}", line))
        return _IN_URL.sub(rf"\1:{HIDDEN}@", line)


def secrets_of(model: BaseModel) -> Iterator[str]:
    """All secret values in the settings."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, SecretStr):
            yield value.get_secret_value()
        elif isinstance(value, BaseModel):
            yield from secrets_of(value)


def set_up(settings: Any) -> None:
    """By log_level and log_format; no line has a secret of these settings."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(as_json=settings.log_format == "json", secrets=secrets_of(settings)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level)


def reload(current: Settings, read: Callable[[], Settings]) -> bool:
    """Takes the log level anew, and tells what else has changed. False: they cannot be used, and all is as before."""
    try:
        settings: Any = read()
    except SettingsError as error:
        logger.error("the settings are not read anew: %s", error)  # noqa: TRY400 - it tells all there is
        return False
    logging.getLogger().setLevel(settings.log_level)
    fixed = [
        name
        for name in type(settings).model_fields
        if name != "log_level" and getattr(settings, name) != getattr(current, name)
    ]
    if fixed:
        logger.warning("changed, and used only after a restart: %s", ", ".join(fixed))
    logger.info("settings read anew")
    return True
