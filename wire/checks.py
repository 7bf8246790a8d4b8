"""Range checks whose errors name the field, the value and the limit."""

from __future__ import annotations

import math
from collections.abc import Sized


def check_int(field: str, value: object, low: int, high: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an int (no bool) in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"{field} must be between {low} and {high}, got {shown(value)}")


def check_float(
    field: str, value: object, low: float, high: float, *, low_open: bool = False
) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number in the range.

    ``low_open`` leaves ``low`` itself out of the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number, got {shown(value)}")
    try:
        value = float(value)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{field} must be finite, got {value}")
    if value < low or value > high or (low_open and value == low):
        bounds = f"{'above' if low_open else 'at least'} {low:g}"
        if high != math.inf:
            bounds += f" and at most {high:g}"
        raise ValueError(f"{field} must be {bounds}, got {value}")


def check_length(field: str, value: Sized, limit: int) -> None:
    """Raise ``ValueError`` when a list, dict or string holds more than ``limit`` entries."""
    if len(value) > limit:
        raise ValueError(f"{field} may hold at most {limit} entries, got {len(value)}")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {shown(value)}")


def shown(value: object) -> str:
    """``repr`` cut to 80 characters, so that a huge value cannot make a huge message."""
    if isinstance(value, str | bytes | list | tuple | dict | set):
        value = value[:80] if isinstance(value, str | bytes) else f"<{type(value).__name__}>"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"<int of {value.bit_length()} bits>"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
