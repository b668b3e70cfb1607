"""Types of option values for argparse. Their errors say what is accepted."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number, at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number, at least 1")
    return value


def seconds(text: str) -> float:
    """A time in seconds. A negative one is accepted and acts as 0."""
    value = number(text)
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds")
    return value


def number(text: str) -> float:
    """The text as a float; NaN, which is within no bounds, for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
