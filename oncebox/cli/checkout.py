"""Commands whose work is done in `proof`: that package is not installed, only a checkout of the project has it."""

import importlib.util


class NoCheckoutError(Exception):
    """The part of the project that is not installed is needed."""


def needs_checkout(command: str, target: str | None = None) -> None:
    """`target`: what make calls it."""
    if importlib.util.find_spec("proof") is None:
        how = f" (make {target})" if target else ""
        raise NoCheckoutError(f"`oncebox {command}` runs from a checkout of the project{how}, not from the package")
