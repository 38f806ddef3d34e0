"""Faults on real parts: a TCP proxy between them (proxy.py), and control of their processes (process.py)."""
