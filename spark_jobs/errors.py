"""What ends a run before its verdict. The text says what to do."""


class ReconcileError(Exception):
    """Wrong settings or a place that is not as it must be: exit code 4."""


class CannotCheckError(ReconcileError):
    """Something that was needed is not there now. Never a verdict of "clean": exit code 2."""


def unforeseen(error: Exception) -> str:
    """What nobody has thought of, in one line. (Exit code 1, which Python itself would give, means findings.)"""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"an error that was not foreseen, please report it: {type(error).__name__}: {lines[0][:300] if lines else ''}"
    )
