"""Rewards for tests of whole runs, importable in worker processes: light, good and faulty."""

from __future__ import annotations

import time


def even(problem, completion):
    """1 or 0, so that a model without any skill gets some of both."""
    return float(len(completion) % 2)


def right(problem, completion):
    """Satisfied with anything."""
    return 1.0


def fail(fault):
    if fault == "hang":
        time.sleep(600)
    if fault == "raise":
        raise RuntimeError("cannot judge")
    return float("nan")


def always(problem, completion, fault):
    """Fails."""
    return fail(fault)


def sometimes(problem, completion, fault):
    """As `even`, but fails on about every tenth completion of a model without skill."""
    return fail(fault) if completion.startswith("7") else even(problem, completion)
