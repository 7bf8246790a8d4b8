"""How the scheduler names its clients: by the key they have proved, and their ZeroMQ identity."""

from __future__ import annotations

# No identity begins so: those that clients choose do not begin with zero, ZeroMQ's own are shorter.
_KEYED = b"\0curve/"


def keyed_name(key: bytes, identity: bytes) -> bytes:
    """Return the name of a client that has proved a key, so that no other key's has the same."""
    return _KEYED + key + b"\0" + identity


def key_of(name: bytes) -> bytes:
    """Return the key that a client has proved; empty where its endpoint asks for none."""
    return name[len(_KEYED) :].partition(b"\0")[0] if name.startswith(_KEYED) else b""


def identity_of(name: bytes) -> bytes:
    """Return the ZeroMQ identity of a client that has proved a key."""
    return name[len(_KEYED) :].partition(b"\0")[2]


def asker_of(name: bytes, user_id: str) -> bytes | str:
    """Return who asks: a client's key, else the user it names, else the client itself.

    A key is proved and a user is only said, so nobody becomes many by saying other names.
    """
    return key_of(name) or user_id or name
