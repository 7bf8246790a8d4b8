"""Files of keys: what is made, what is taken, and what is noticed."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import zmq

from deepinfer import Client
from deepinfer.wire import curve
from deepinfer.wire.curve import AllowedKeys, client_keys, make_client_keys, server_secret
from support.curve import KeyFolder


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    old = os.umask(0)  # whatever it is, nobody else may read a secret
    try:
        return KeyFolder(tmp_path / "deep" / "keys", names=("one",))
    finally:
        os.umask(old)


def test_secrets_are_for_their_owner_and_public_keys_belong_to_them(keys) -> None:
    for folder in (keys.path, keys.path / "clients"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    pairs = [keys.path / "server", keys.path / "clients" / "one"]
    assert {p.with_suffix("") for p in keys.path.rglob("*") if p.is_file()} == set(pairs)
    for pair in pairs:
        secret, public = pair.with_suffix(".key"), pair.with_suffix(".pub")
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert zmq.curve_public(secret.read_bytes().strip()) == public.read_bytes().strip()


def test_a_client_needs_both_keys_and_they_must_be_keys(keys, tmp_path) -> None:
    good = keys.client("one")
    assert client_keys(None, None) is None
    for missing in good:
        with pytest.raises(ValueError, match=f"{missing} is missing"):
            client_keys(**(good | {missing: None}))
    text = tmp_path / "text"
    text.write_text("no key")
    secret = good["secret_key"].read_text().strip()
    # As it is read from the file, which ends with a newline.
    assert client_keys(**(good | {"secret_key": f"{secret}\n"})) == client_keys(**good)
    for wrong in ("no key", secret[:-1], secret + "0", "/nowhere/else", text, tmp_path, "é" * 40):
        for field in good:
            with pytest.raises(ValueError, match=f"^{field}") as error:
                client_keys(**(good | {field: wrong}))
            assert secret[:-1] not in str(error.value)


def test_a_key_file_that_is_not_one_is_not_waited_for(keys) -> None:
    os.mkfifo(keys.path / "clients" / "pipe.pub")
    allowed = AllowedKeys(keys.path)
    assert keys.raw("one").public in allowed
    (keys.path / "server.key").unlink()
    os.mkfifo(keys.path / "server.key")
    with pytest.raises(ValueError, match=r"no server\.key"):
        server_secret(keys.path)


@pytest.mark.parametrize("name", ["", ".", "..", "-x", "a/b", "a\0", "x" * 101, "ä", "a\n"])
def test_a_clients_name_is_fit_for_a_file(tmp_path, name) -> None:
    with pytest.raises(ValueError, match="client must be a name"):
        make_client_keys(tmp_path, name)


def test_keys_that_come_go_or_change_are_noticed(keys) -> None:
    allowed = AllowedKeys(keys.path)
    assert not allowed.refresh()
    one, two = keys.raw("one").public, keys.raw("two").public
    assert two not in allowed
    assert allowed.refresh()
    assert one in allowed and two in allowed
    # Written over, as `cp` does, and in a directory whose own time stays the same.
    (keys.path / "clients" / "two.pub").write_bytes(one + b"\n\n")
    assert allowed.refresh()
    assert one in allowed and two not in allowed
    keys.remove("one")
    assert allowed.refresh()
    assert one in allowed  # by the other file
    keys.remove("two")
    assert allowed.refresh()
    assert one not in allowed


def test_an_operator_is_who_has_its_key_among_them(keys, caplog) -> None:
    allowed = AllowedKeys(keys.path)
    assert not allowed.is_operator(keys.raw("one").public)
    secret = make_client_keys(keys.path, "ops", operator=True)
    assert secret.parent == keys.path / "operators"
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    public = secret.with_suffix(".pub").read_bytes().strip()
    assert allowed.refresh()
    assert public in allowed and allowed.is_operator(public)
    assert not allowed.is_operator(keys.raw("one").public)
    for operator in (False, True):
        with pytest.raises(FileExistsError, match="ops.pub"):
            make_client_keys(keys.path, "ops", operator=operator)
    secret.with_suffix(".pub").rename(keys.path / "clients" / "ops.pub")
    assert allowed.refresh()
    assert public in allowed and not allowed.is_operator(public)
    assert not caplog.text


def test_what_cannot_be_read_lets_nobody_in(keys, caplog) -> None:
    one = keys.raw("one").public
    folder = keys.path / "clients"
    (folder / "long.pub").write_bytes(one * 20)
    (folder / "empty.pub").write_bytes(b"")
    (folder / "note.txt").write_bytes(keys.raw("two").public)
    keys.remove("two")
    allowed = AllowedKeys(keys.path)
    assert one in allowed and keys.raw("two").public not in allowed
    assert caplog.text.count("nobody gets in by") == 2
    folder.rename(keys.path / "elsewhere")
    assert allowed.refresh()
    assert one not in allowed
    assert "no client gets in" in caplog.text


@pytest.mark.parametrize("call", ["scandir", "open"])
def test_a_lack_of_descriptors_takes_no_key_away(keys, monkeypatch, call) -> None:
    """Strangers can use them up, by connections that never prove a key."""
    one, two = keys.raw("one").public, keys.raw("two").public
    allowed = AllowedKeys(keys.path)
    keys.remove("two")
    three = keys.raw("three").public

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(curve.os, call, fails)
        assert not allowed.refresh()
        assert one in allowed and two in allowed
    assert allowed.refresh()
    assert one in allowed and two not in allowed and three in allowed


def test_the_number_of_keys_is_bounded(keys, monkeypatch, caplog) -> None:
    monkeypatch.setattr(curve, "MAX_CLIENT_KEYS", 1)
    publics = [keys.raw(name).public for name in ("one", "two")]
    allowed = AllowedKeys(keys.path)
    assert sum(public in allowed for public in publics) == 1
    assert "more than 1 keys" in caplog.text


def test_a_client_without_an_endpoint_goes_where_the_engine_command_listens(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path))
    monkeypatch.delenv("DEEPINFER_ENDPOINT", raising=False)
    assert Client()._address(same_engine=False)[0] == f"ipc://{tmp_path}/engine.sock"
    monkeypatch.setenv("DEEPINFER_ENDPOINT", "tcp://127.0.0.1:5")
    assert Client()._address(same_engine=False)[0] == "tcp://127.0.0.1:5"
    monkeypatch.setenv("DEEPINFER_ENDPOINT", "tcp://example.org:5")
    with pytest.raises(ValueError, match="server_key and secret_key"):
        Client()
