"""The tenants' file: TOML, one table a tenant. Errors name the file, the tenant and the field."""

from __future__ import annotations

import os
import re
import tomllib
from typing import Any

import msgspec

from deepinfer.wire.checks import check_float, check_int, check_length, shown

MAX_FILE_BYTES = 8 << 20
MAX_KEYS = 1000
"""API keys of one tenant."""
MAX_QUEUED = 100_000
MAX_PRIORITY = 1_000_000
"""As far as the engine's priorities go, in both directions."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class TenantLimits(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One table of the file. ``None`` means no limit. ``ValueError`` names the field."""

    keys: list[str]
    """``sha256:`` and 64 hexadecimal digits for each API key; none locks the tenant out."""
    weight: float = 1.0
    """Share of the engine while several tenants wait for it, relative to the others' weights."""
    requests_per_s: float | None = None
    """Requests let in a second on average, at most one second's worth (and one) at once."""
    tokens_per_min: float | None = None
    """Prompt and output tokens a minute on average, a minute's worth at once."""
    max_concurrent: int | None = None
    """Requests in the engine at a time."""
    max_queued: int = 0
    """Requests that wait in the gateway while ``max_concurrent`` are in the engine."""
    max_tokens: int | None = None
    """Output tokens of one completion, at most; also what a request gets that names no number."""
    priority: tuple[int, int] = (0, MAX_PRIORITY)
    """Lowest and highest number a request may name; a lower number goes first."""
    cache_group: str | None = None
    """Tenants of one group find each other's prompts in the prefix cache."""
    operator: bool = False
    """May see what concerns all tenants: metrics, the dashboard, any request's story."""

    def __post_init__(self) -> None:
        check_length("keys", self.keys, MAX_KEYS)
        for key in self.keys:
            if not _DIGEST.fullmatch(key):
                # Not shown in full: whoever pasted a key instead has it in a log otherwise.
                start = shown(key[:10] + "…")
                raise ValueError(f"keys must be sha256: and 64 digits of 0-9a-f, got {start}")
        check_float("weight", self.weight, 1e-3, 1e3)
        if self.requests_per_s is not None:
            check_float("requests_per_s", self.requests_per_s, 1e-6, 1e6)
        if self.tokens_per_min is not None:
            check_float("tokens_per_min", self.tokens_per_min, 1, 1e9)
        if self.max_concurrent is not None:
            check_int("max_concurrent", self.max_concurrent, 1, MAX_QUEUED)
        check_int("max_queued", self.max_queued, 0, MAX_QUEUED)
        if self.max_queued and self.max_concurrent is None:
            raise ValueError("max_queued needs max_concurrent: without it nobody waits")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        for bound in self.priority:
            check_int("priority", bound, -MAX_PRIORITY, MAX_PRIORITY)
        if self.priority[0] > self.priority[1]:
            raise ValueError(f"priority must be [lowest, highest], got {list(self.priority)}")
        if self.cache_group is not None:
            check_name("cache_group", self.cache_group)


ANONYMOUS = TenantLimits(keys=[], priority=(-MAX_PRIORITY, MAX_PRIORITY), operator=True)
"""Where there is no file: whoever comes may do everything."""


class Stamp(msgspec.Struct, frozen=True):
    """What tells that a file was changed or replaced."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Stamp:
        """Return the stamp of a file's status."""
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def check_name(field: str, name: str) -> None:
    """Raise ``ValueError`` unless ``name`` can name a tenant or a group."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{field} must have 1 to 64 of the characters A-Z a-z 0-9 . _ - "
            f"and begin with a letter or digit, got {shown(name)}"
        )


def read_tenants(path: str | os.PathLike[str]) -> tuple[dict[str, TenantLimits], Stamp]:
    """Return the tenants of a file by name, and the stamp of what was read.

    ``OSError`` when it cannot be read; ``ValueError`` when anything in it is not as it should be,
    nobody is in it included: a file cut short must not lock everyone out.
    """
    with open(path, "rb") as file:
        stamp = Stamp.of(os.fstat(file.fileno()))
        content = file.read(MAX_FILE_BYTES + 1)
    try:
        return _tenants(content), stamp
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _tenants(content: bytes) -> dict[str, TenantLimits]:
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        top = tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    tables = top.pop("tenants", None)
    if top:
        raise ValueError(f"only [tenants.NAME] tables are known, found {shown(next(iter(top)))}")
    if not isinstance(tables, dict) or not tables:
        raise ValueError("there is no [tenants.NAME] table")
    tenants = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        tenants[name] = _tenant(name, table)
        for key in tenants[name].keys:
            if (owner := owners.setdefault(key, name)) != name:
                raise ValueError(f"[tenants.{name}] keys: {key[:15]}… is a key of {owner} as well")
    return tenants


def _tenant(name: str, table: Any) -> TenantLimits:
    check_name("the name after [tenants.", name)
    try:
        return msgspec.convert(table, TenantLimits)
    except ValueError as error:  # msgspec's own ValidationError among them
        raise ValueError(f"[tenants.{name}] {error}") from None
