"""What ends a run before its verdict. The text says what to do."""


class ReconcileError(Exception):
    """Wrong settings or a place that is not as it must be: exit code 4."""


class CannotCheckError(ReconcileError):
    """Something that was needed is not there now. Never a verdict of "clean": exit code 2."""
