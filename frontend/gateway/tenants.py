"""Who may send requests, and how many: API keys, and what each tenant is held to.

Everything belongs to one event loop. Times are seconds of the monotonic clock the tenants were
made with.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from deepinfer.frontend.gateway.errors import ApiError, bad_request, rate_limited
from deepinfer.frontend.gateway.limits import Bucket, Slots
from deepinfer.frontend.gateway.tenant_file import ANONYMOUS, Stamp, TenantLimits, read_tenants
from deepinfer.wire.checks import shown

log = logging.getLogger("deepinfer.gateway")

LIMITS = ("requests_per_s", "tokens_per_min", "max_concurrent")
"""The limits that a request can be refused for with status 429."""

_MEAN_WEIGHT = 1 / 8
"""How much one request counts in the mean time a tenant's requests take."""


def new_key() -> tuple[str, str]:
    """Return a new API key and what stands for it in the tenants' file."""
    key = "di-" + secrets.token_urlsafe(32)
    return key, digest_of(key)


def digest_of(key: str) -> str:
    """Return ``sha256:`` and the digest of a key, in hexadecimal.

    A slow, salted hash guards passwords, which can be guessed. A key has 256 random bits: there is
    nothing to guess, and one plain digest leaves nothing to find out.
    """
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Admission:
    """One request that was let in. ``queued_s`` is how long it waited for its slot, in seconds."""

    __slots__ = ("entered_at", "left", "queued_s")

    def __init__(self, entered_at: float, queued_s: float) -> None:
        self.entered_at = entered_at
        self.queued_s = queued_s
        self.left = False


class Tenant:
    """One user of the gateway: what its requests may ask for, and how many may come."""

    def __init__(
        self,
        name: str,
        limits: TenantLimits,
        clock: Callable[[], float],
        refused: dict[str, int] | None = None,
    ) -> None:
        self.name = name
        self.refused = dict.fromkeys(LIMITS, 0) if refused is None else refused
        """Requests turned away, by the limit they met."""
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._slots = Slots()
        self._mean_open_s = 1.0
        self.change(limits)

    @property
    def weight(self) -> float:
        """Its share of the engine, relative to the others' weights."""
        return self._limits.weight

    @property
    def operator(self) -> bool:
        """Whether it may see what concerns all tenants."""
        return self._limits.operator

    @property
    def cache_salt(self) -> str:
        """What separates its prefix-cache entries from those of others; "" shares with anyone.

        Names hold no colon, so a group is never mistaken for a tenant.
        """
        if not self.name:
            return ""
        group = self._limits.cache_group
        return f"tenant:{self.name}" if group is None else f"group:{group}"

    @property
    def open(self) -> int:
        """Requests that are let in and have not left."""
        return self._slots.inside

    @property
    def waiting(self) -> int:
        """Requests that wait in the gateway for a slot."""
        return self._slots.waiting

    def limit_max_tokens(self, requested: int | None, field: str = "max_tokens") -> int | None:
        """Return how many tokens a completion may have, ``None`` for no limit.

        ``ApiError`` 400 when more was asked for than the tenant may have; ``field`` is what the
        client called it.
        """
        limit = self._limits.max_tokens
        if requested is not None and limit is not None and requested > limit:
            raise bad_request(
                f"{field} may be at most {limit} with this API key, got {shown(requested)}", field
            )
        return limit if requested is None else requested

    def check_priority(self, priority: int | None) -> int:
        """Return the priority of a request, ``ApiError`` 400 when it is out of the tenant's range.

        A request that names none has 0, or what the tenant may have that is nearest to it.
        """
        low, high = self._limits.priority
        if priority is None:
            return min(max(0, low), high)
        if not low <= priority <= high:
            raise bad_request(
                f"priority must be between {low} and {high} with this API key, "
                f"got {shown(priority)}",
                "priority",
            )
        return priority

    @asynccontextmanager
    async def admit(self, now: float | None = None) -> AsyncIterator[Admission]:
        """Hold a slot for a request while the block runs: :meth:`enter` and :meth:`leave`."""
        admission = await self.enter(now)
        try:
            yield admission
        finally:
            self.leave(admission)

    async def enter(self, now: float | None = None) -> Admission:
        """Let a request in that arrived ``now``, when its turn comes.

        ``ApiError`` 429 when a limit is met. Its ``retry_after_s`` is the time after which the same
        request passes if no other comes in between; where the queue is full it is an estimate, see
        :meth:`_slot_wait_s`. A refused request counts for no limit, a cancelled one holds no slot.
        """
        now = self._clock() if now is None else now
        self._refuse_over_limit(now)
        if self._requests is not None:
            self._requests.take(1, now)
        if not self._slots.full:
            await self._slots.enter()
            return Admission(now, 0.0)
        queued_at = self._clock()
        await self._slots.enter()
        entered_at = self._clock()
        return Admission(entered_at, entered_at - queued_at)

    def leave(self, admission: Admission) -> None:
        """End a request: its slot goes to the next in line. ``RuntimeError`` the second time."""
        if admission.left:
            raise RuntimeError("a request leaves once")
        admission.left = True
        took = max(0.0, self._clock() - admission.entered_at)
        self._mean_open_s += (took - self._mean_open_s) * _MEAN_WEIGHT
        self._slots.leave()

    def spend(self, tokens: int, now: float | None = None) -> None:
        """Charge tokens of the prompt or the output of a request that was let in.

        They may be more than ``tokens_per_min`` leaves. The tenant is in debt then, and requests
        that arrive before it is paid are refused; what was let in goes on.
        """
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock() if now is None else now)

    def change(self, limits: TenantLimits) -> None:
        """Put other limits in force. Open requests, counts and what is owed stay."""
        now = self._clock()
        self._limits = limits
        self._requests = _changed(
            self._requests, limits.requests_per_s, max(1.0, limits.requests_per_s or 0.0), now
        )
        per_min = limits.tokens_per_min
        self._tokens = _changed(self._tokens, per_min and per_min / 60, per_min or 0.0, now)
        self._slots.resize(math.inf if limits.max_concurrent is None else limits.max_concurrent)

    def _refuse_over_limit(self, now: float) -> None:
        limits = self._limits
        waits: dict[str, float] = {}
        if self._requests is not None:
            waits["requests_per_s"] = self._requests.wait_s(1, now)
        if self._tokens is not None:
            waits["tokens_per_min"] = self._tokens.wait_s(0, now)
        if self._slots.full and self._slots.waiting >= limits.max_queued:
            waits["max_concurrent"] = self._slot_wait_s()
        limit, wait = max(waits.items(), key=lambda item: item[1], default=("", 0.0))
        if wait <= 0:
            return
        self.refused[limit] += 1
        text = f"{limit} of this API key is {getattr(limits, limit):.12g}"
        if limit == "max_concurrent":
            text += f", and {self._slots.waiting} requests wait already"
        raise rate_limited(f"{text}; try again in {wait:.3g} s", wait)

    def _slot_wait_s(self) -> float:
        """Estimate when the next place gets free.

        One of the requests inside ends on average each time that one takes (a running mean of
        this tenant's), divided by how many are inside.
        """
        return max(1e-3, self._mean_open_s / max(1, self._slots.inside))


class Tenants:
    """All who may send requests. Iterating gives each, and those removed with requests open."""

    def __init__(
        self,
        limits: dict[str, TenantLimits],
        path: str | os.PathLike[str] | None = None,
        stamp: Stamp | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._stamp = stamp
        self._clock = clock
        self.refused: dict[str, dict[str, int]] = {}
        """Refusals by tenant and limit, also those of tenants that were removed."""
        self._by_name: dict[str, Tenant] = {}
        self._by_digest: dict[str, Tenant] = {}
        self._change(limits)

    @classmethod
    def anonymous(cls, clock: Callable[[], float] = time.monotonic) -> Tenants:
        """Without a file: everyone is the tenant "", without limits; keys are not looked at."""
        return cls({"": ANONYMOUS}, clock=clock)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic
    ) -> Tenants:
        """Return the tenants of a file; ``OSError`` or ``ValueError`` says what is wrong."""
        limits, stamp = read_tenants(path)
        return cls(limits, path, stamp, clock)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def identify(self, authorization: str | None) -> Tenant:
        """Return whose key an ``Authorization`` header bears; ``ApiError`` 401 when nobody's."""
        if self._path is None:
            return self._by_name[""]
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _unauthorized("no API key: send it as `Authorization: Bearer KEY`")
        # What is looked up is a digest, so how long it takes says nothing about a key.
        tenant = self._by_digest.get(digest_of(key.strip()))
        if tenant is None:
            raise _unauthorized("incorrect API key")
        return tenant

    def reload_if_changed(self) -> bool:
        """Read the file again when it was changed; return whether other tenants are in force.

        Cheap when nothing changed (one ``stat``). Who stays keeps its open requests, its counts
        and what it owes. Who is gone is refused at once; what it had open, running or in line,
        goes on. A file that is missing or broken changes nothing: one warning tells, until the
        file changes again.
        """
        if self._path is None:
            return False
        try:
            stamp = Stamp.of(os.stat(self._path))
        except OSError as error:
            self._keep(None, error)
            return False
        if stamp == self._stamp:
            return False
        try:
            limits, self._stamp = read_tenants(self._path)
        except (OSError, ValueError) as error:
            self._keep(stamp, error)
            return False
        self._change(limits)
        log.info("%s: %d tenants", os.fspath(self._path), len(limits))
        return True

    def _keep(self, stamp: Stamp | None, error: Exception) -> None:
        if stamp != self._stamp:
            log.warning("the tenants stay as they were: %s", error)
        self._stamp = stamp

    def _change(self, limits: dict[str, TenantLimits]) -> None:
        tenants = {
            name: tenant
            for name, tenant in self._by_name.items()
            if name in limits or tenant.open or tenant.waiting
        }
        for name, changed in limits.items():
            if name in tenants:
                tenants[name].change(changed)
            else:
                tenants[name] = Tenant(name, changed, self._clock, self.refused.get(name))
        # Exchanged and not changed: metrics are read in a thread.
        self._by_name = tenants
        self.refused = self.refused | {name: each.refused for name, each in tenants.items()}
        self._by_digest = {
            digest: tenants[name] for name, each in limits.items() for digest in each.keys
        }


def _changed(bucket: Bucket | None, rate: float | None, burst: float, now: float) -> Bucket | None:
    if rate is None:
        return None
    if bucket is None:
        return Bucket(rate, burst, now)
    bucket.change(rate, burst, now)
    return bucket


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
