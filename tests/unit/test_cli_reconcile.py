"""How a run of the reconciliation hears that it is told to stop."""

import pytest

from oncebox.cli.reconcile import _progress, _Stop


def test_an_interrupt_that_is_lost_ends_the_run_with_its_next_step(capsys: pytest.CaptureFixture[str]):
    stop = _Stop()
    tell = _progress(stop)
    tell("a step")
    with pytest.raises(KeyboardInterrupt):
        stop()
    # Python has ignored it, as it does in a weak reference's callback.
    with pytest.raises(KeyboardInterrupt):
        tell("another step")
    assert "a step" in capsys.readouterr().err
