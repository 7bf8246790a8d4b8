"""What every process that reads a model folder needs: its JSON files, field by field, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.wire.checks import check_float, check_int, shown

_MAX_JSON_BYTES = 8 << 20
_ABSENT: Any = object()


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the file, the field and the limit."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ``ModelError`` when missing, oversized or not an object."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_JSON_BYTES:
        raise ModelError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """One JSON object read field by field; every complaint names the file and the field."""

    def __init__(self, raw: dict[str, Any], defaults: dict[str, Any], source: str) -> None:
        self.raw = raw
        self.defaults = defaults
        self.source = source

    def error(self, message: str) -> ModelError:
        """An error that names the file; to be raised."""
        return ModelError(f"{self.source}: {message}")

    def get(self, name: str) -> Any:
        """The value, or its default; ``ModelError`` when there is neither."""
        value = self.raw.get(name, self.defaults.get(name, _ABSENT))
        if value is _ABSENT:
            raise self.error(f"{name} is missing")
        return value

    def nested(self, name: str, defaults: dict[str, Any]) -> Fields:
        """The fields of an object within; where it is something else, they are the defaults."""
        value = self.get(name)
        raw = value if isinstance(value, dict) else {}
        return Fields(raw, defaults, f"{self.source}: {name}")

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number in the range."""
        value = self.get(name)
        try:
            check_int(name, value, low, high)
        except ValueError as error:
            raise self.error(str(error)) from error
        return int(value)

    def number(self, name: str, low: float, high: float, *, low_open: bool = False) -> float:
        """A finite number in the range."""
        value = self.get(name)
        try:
            check_float(name, value, low, high, low_open=low_open)
        except (ValueError, OverflowError) as error:
            raise self.error(f"{name}: {error}") from error
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {shown(value)}")
        return value
