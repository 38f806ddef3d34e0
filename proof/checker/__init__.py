"""Judges what a run has done, simulated or real: a history of plain events in, findings by name out.

Knows no coordinator: whatever records such events can be judged.
"""
