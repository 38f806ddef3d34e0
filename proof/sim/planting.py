"""How a bug gets into the real code, for as long as a stack is open."""

from contextlib import ExitStack
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import msgspec

from coordinator import inbox, loading

T = TypeVar("T")


def put(stack: ExitStack, where: Any, name: str, value: Any) -> None:
    stack.enter_context(patch.object(where, name, value))


def changed(value: T, **changes: Any) -> T:
    """A copy, of a dataclass or a struct."""
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **changes)
    copy: T = msgspec.structs.replace(cast("Any", value), **changes)
    return copy


def without_invariants(stack: ExitStack) -> None:
    """The code's own net would stop the partition first: here the checker is put to the test."""
    put(stack, inbox, "check_step", lambda _before, _after: None)
    put(stack, loading, "check", lambda _state: None)
