"""Keys of CURVE, ZeroMQ's encryption and authentication: their files, and who may speak.

A folder of ``deepinfer keys`` holds ``server.key`` (the engine's secret), ``server.pub`` (which its
clients need) and ``clients/NAME.pub`` for each client that may speak; in ``operators/`` instead of
``clients/`` it may also see what concerns others. A key is 32 bytes, in a file
and on a command line 40 characters of Z85 (ZeroMQ RFC 32).
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import zmq

from deepinfer.wire.checks import shown

log = logging.getLogger("deepinfer.wire")

MAX_CLIENT_KEYS = 4096
"""Public keys that are read of a folder."""

KEY_CHARS = 40
CLIENTS, OPERATORS = "clients", "operators"
_MAX_FILE_BYTES = 256
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class ClientKeys(NamedTuple):
    """What a client needs: the engine's public key and its own pair, each as Z85."""

    server: bytes
    public: bytes
    secret: bytes


def make_server_keys(folder: Path) -> bytes:
    """Make the key pair of an engine in a folder and return its public key as Z85.

    ``FileExistsError`` when there is one.
    """
    _make_folders(folder)
    public, secret = zmq.curve_keypair()
    _write_new(folder / "server.key", secret)
    _replace(folder / "server.pub", public)
    return public


def make_client_keys(folder: Path, name: str, *, operator: bool = False) -> Path:
    """Let one more client in; return the file of its secret key, which belongs on its machine.

    An ``operator`` may also see other clients' requests.
    ``ValueError`` when the name is not fit for a file, ``FileExistsError`` when it is taken.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            "client must be a name of 1 to 100 letters, digits, dots, dashes and underscores that "
            f"begins with no dot or dash, got {shown(name)}"
        )
    _make_folders(folder)
    for there in (folder / CLIENTS, folder / OPERATORS):
        if (there / f"{name}.pub").exists():
            raise FileExistsError(17, "this client has a key", str(there / f"{name}.pub"))
    own = folder / (OPERATORS if operator else CLIENTS)
    own.mkdir(mode=0o700, exist_ok=True)
    public, secret = zmq.curve_keypair()
    _write_new(own / f"{name}.key", secret)
    _replace(own / f"{name}.pub", public)
    return own / f"{name}.key"


def server_secret(folder: str | Path) -> bytes:
    """Return the engine's secret key as Z85; ``ValueError`` when the folder has none."""
    path = Path(folder) / "server.key"
    if not path.is_file():
        raise ValueError(f"curve_keys: no server.key in {folder}; make one with `deepinfer keys`")
    key = _checked("curve_keys", _read(path), path)
    _public("curve_keys", key)
    return key


def client_keys(server_key: str | Path | None, secret_key: str | Path | None) -> ClientKeys | None:
    """Return the keys of a client, each given as Z85 or as the path of a file that holds it.

    ``None`` when neither is given; ``ValueError`` naming the argument that is missing or no key.
    """
    if server_key is None and secret_key is None:
        return None
    for field, value in (("server_key", server_key), ("secret_key", secret_key)):
        if value is None:
            raise ValueError(f"{field} is missing: an engine with keys needs both keys")
    secret = _key_of("secret_key", secret_key)
    return ClientKeys(_key_of("server_key", server_key), _public("secret_key", secret), secret)


_Stamp = tuple[int, int, int]
"""What of a file changes when it does: time, inode and size."""


class AllowedKeys:
    """The public keys in ``clients/*.pub`` and ``operators/*.pub`` of a folder, as Z85.

    ``refresh`` notices what changed.

    A look costs about 3 microseconds for each file, and reading one that changed 15.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._stamps: dict[str, _Stamp] = {}
        self._by_file: dict[str, bytes | None] = {}
        self._keys: frozenset[bytes] = frozenset()
        self._operators: frozenset[bytes] = frozenset()
        self.refresh()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def is_operator(self, key: bytes) -> bool:
        """Whether a key may see what concerns other clients."""
        return key in self._operators

    def refresh(self) -> bool:
        """Look at the files again; return whether one came, went or changed.

        A file that is no key, or may not be read, lets nobody in. Where it is this process that
        cannot look, for want of descriptors say, what was known stays known.
        """
        try:
            stamps = self._look()
            if stamps == self._stamps:
                return False
            by_file = {name: self._key_in(name, stamp) for name, stamp in stamps.items()}
        except OSError as error:
            log.warning("the keys of clients cannot be looked at: %s", error)
            return False
        self._stamps, self._by_file = stamps, by_file
        known = {name: key for name, key in by_file.items() if key is not None}
        self._keys = frozenset(known.values())
        self._operators = frozenset(
            key for name, key in known.items() if name.startswith(f"{OPERATORS}/")
        )
        return True

    def _key_in(self, name: str, stamp: _Stamp) -> bytes | None:
        if self._stamps.get(name) == stamp:
            return self._by_file[name]
        path = self._folder / name
        try:
            return _checked("a client's key", _read(path), path)
        except (FileNotFoundError, PermissionError, ValueError) as error:
            log.warning("nobody gets in by %s: %s", path, error)
            return None

    def _look(self) -> dict[str, _Stamp]:
        # In this order: a key that moves to the operators meanwhile is found.
        return self._look_into(CLIENTS) | self._look_into(OPERATORS)

    def _look_into(self, kind: str) -> dict[str, _Stamp]:
        found: dict[str, _Stamp] = {}
        try:
            with os.scandir(self._folder / kind) as entries:
                for entry in entries:
                    if not entry.name.endswith(".pub"):
                        continue
                    try:
                        info = entry.stat()
                    except OSError:  # removed just now
                        continue
                    if len(found) == MAX_CLIENT_KEYS:
                        log.warning(
                            "%s/%s holds more than %d keys", self._folder, kind, MAX_CLIENT_KEYS
                        )
                        break
                    found[f"{kind}/{entry.name}"] = (info.st_mtime_ns, info.st_ino, info.st_size)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            # Without operators there is no folder of theirs.
            if kind == CLIENTS or not isinstance(error, FileNotFoundError):
                log.warning("no client gets in by %s/: %s", kind, error)
        return found


def _key_of(field: str, value: str | Path | None) -> bytes:
    if isinstance(value, str | Path) and os.path.isfile(value):
        return _checked(field, _read(Path(value)), value)
    key = value.strip() if isinstance(value, str) else ""  # a key's file ends with a newline
    if not _Z85.fullmatch(key.encode(errors="replace")):
        # Not shown: it may be a secret with a typing error.
        raise ValueError(f"{field} is neither a key ({KEY_CHARS} characters of Z85) nor a file")
    return key.encode()


def _checked(field: str, text: bytes, path: str | Path) -> bytes:
    if not _Z85.fullmatch(text):
        raise ValueError(f"{field}: {path} holds no key ({KEY_CHARS} characters of Z85)")
    return text


def _public(field: str, secret: bytes) -> bytes:
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError as error:
        raise ValueError(f"{field} is no secret key") from error


def _read(path: Path) -> bytes:
    """Read a small file; anything else, a pipe for example, is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a file")
        return os.read(descriptor, _MAX_FILE_BYTES).strip()
    finally:
        os.close(descriptor)


def _make_folders(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
    (folder / CLIENTS).mkdir(mode=0o700, exist_ok=True)


def _write_new(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")


def _replace(path: Path, key: bytes) -> None:
    """Write a file that is complete as soon as it has its name."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    _write_new(new, key)
    new.replace(path)
