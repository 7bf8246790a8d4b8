"""Fetching: what a client's URL may reach, for how long, and what its errors say."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deepinfer.image_worker.errors import Deadline, ImageError
from deepinfer.image_worker.fetch import Fetcher, is_public
from deepinfer.wire.messages import ImageRef

CERTIFICATE = Path(__file__).parent / "data" / "self_signed.pem"
SECRET = b"the-secret-of-the-metadata-service"
FILE = b"\x89PNG" + bytes(range(256)) * 40
OPEN = "127.0.0.2"
"""Where the tests' public host lives: the fetcher is told that this one address is public."""

Answer = Callable[[socket.socket, bytes], None]


class Host:
    """An HTTP server that answers with what it is told and counts who came."""

    def __init__(self, address: str, answer: Answer, tls: ssl.SSLContext | None) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._answer = answer
        self._tls = tls
        self._listener = socket.create_server((address, 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with suppress(OSError), peer:  # the fetcher left
                self._talk(peer)

    def _talk(self, peer: socket.socket) -> None:
        with peer if self._tls is None else self._tls.wrap_socket(peer, server_side=True) as safe:
            request = b""
            while b"\r\n\r\n" not in request and (piece := safe.recv(65536)):
                request += piece
            self.requests.append(request)
            self._answer(safe, request)


@contextmanager
def host(answer: Answer, address: str = OPEN, tls: ssl.SSLContext | None = None) -> Iterator[Host]:
    made = Host(address, answer, tls)
    try:
        yield made
    finally:
        made.close()


def sends(*parts: bytes) -> Answer:
    return lambda peer, _: [peer.sendall(part) for part in parts] and None


def redirects(location: str, status: int = 302) -> Answer:
    return sends(f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\n\r\n".encode())


WITH_LENGTH = sends(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(FILE), FILE)


@pytest.fixture
def secret() -> Iterator[Host]:
    """A server of the machine itself, which nobody outside may reach."""
    with host(sends(b"HTTP/1.1 200 OK\r\n\r\n" + SECRET), "127.0.0.1") as made:
        yield made
        assert made.connections == 0


def known(**names: str) -> Callable[[str, int], list[str]]:
    def resolve(name: str, port: int) -> list[str]:
        found = names.get(name.partition(".")[0])
        if found is None:
            raise socket.gaierror("no such host")
        return found.split(",")

    return resolve


def fetched(
    url: str,
    *,
    resolve: Callable[[str, int], list[str]] | None = None,
    timeout_s: float = 20.0,
    max_bytes: int = 1 << 20,
) -> bytes:
    fetcher = Fetcher(
        True,
        max_bytes,
        resolve or known(pictures=OPEN, secret="127.0.0.1"),
        lambda address: address == OPEN or is_public(address),
    )
    return fetcher.fetch(ImageRef(url=url), Deadline(timeout_s))


def refused(url: str, match: str, **how: object) -> str:
    with pytest.raises(ImageError, match=match) as failed:
        fetched(url, **how)  # type: ignore[arg-type]
    assert SECRET.decode() not in str(failed.value)
    return str(failed.value)


def test_a_file_comes_whole_with_or_without_a_length() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for part in (FILE[:5], FILE[5:]):
        chunked += b"%x\r\n%s\r\n" % (len(part), part)
    for answer in (
        WITH_LENGTH,
        sends(b"HTTP/1.1 200 OK\r\n\r\n", FILE[:100], FILE[100:]),
        sends(chunked + b"0\r\n\r\n"),
    ):
        with host(answer) as pictures:
            assert fetched(f"http://pictures.test:{pictures.port}/a%20b?c=1#d") == FILE
        request = pictures.requests[0].decode()
        assert request.startswith("GET /a%20b?c=1 HTTP/1.1\r\n")
        assert f"\r\nHost: pictures.test:{pictures.port}\r\n" in request


def test_without_leave_nothing_is_asked_not_even_the_resolver() -> None:
    fetcher = Fetcher(False, resolve=lambda *_: pytest.fail("it asks the resolver"))
    with pytest.raises(ImageError, match="does not fetch images"):
        fetcher.fetch(ImageRef(url="http://pictures.test/"), Deadline(5))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/", "http://[::1]:{port}/", "http://0.0.0.0:{port}/",
        "http://2130706433:{port}/", "http://0x7f.1:{port}/", "http://127.1:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/",
        "http://localhost:{port}/", "http://[64:ff9b::7f00:1]:{port}/", "http://[::]:{port}/",
        "http://169.254.169.254/latest/meta-data", "http://[fe80::1]/", "http://10.0.0.1/",
        "http://192.168.1.1/", "http://172.16.0.1/", "http://100.64.0.1/", "http://[fd00::1]/",
        "http://224.0.0.1/", "http://255.255.255.255/", "http://[2002:7f00:1::]/",
        "http://[::7f00:1]/",
    ],
)  # fmt: skip
def test_addresses_of_the_machine_and_its_networks_are_refused(secret: Host, url: str) -> None:
    fetcher = Fetcher(True)
    with pytest.raises(ImageError, match="not on the open internet|is not known"):
        fetcher.fetch(ImageRef(url=url.format(port=secret.port)), Deadline(10))


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_addresses_of_the_open_internet_are_not(address: str) -> None:
    assert is_public(address)


def test_a_name_with_one_address_inside_is_refused(secret: Host) -> None:
    resolve = known(pictures=f"{OPEN},127.0.0.1")
    refused(f"http://pictures.test:{secret.port}/", "not on the open internet", resolve=resolve)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("name", ["127.0.0.1", "secret.test", "[::ffff:127.0.0.1]"])
def test_a_redirect_to_the_inside_is_refused(secret: Host, status: int, name: str) -> None:
    names = known(**{"pictures": OPEN, "secret": "127.0.0.1", "127": "127.0.0.1"})

    def resolve(host: str, port: int) -> list[str]:
        return [host] if ":" in host else names(host, port)

    with host(redirects(f"http://{name}:{secret.port}/", status)) as pictures:
        refused(
            f"http://pictures.test:{pictures.port}/", "not on the open internet", resolve=resolve
        )
    assert pictures.connections == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://pictures.test/", "gopher://x/"])
def test_other_schemes_are_refused_also_after_a_redirect(url: str) -> None:
    refused(url, "must be http or https")
    with host(redirects(url)) as pictures:
        refused(f"http://pictures.test:{pictures.port}/", "must be http or https")


def test_a_name_is_resolved_once_and_the_address_is_kept(secret: Host) -> None:
    answers = iter([[OPEN], ["127.0.0.1"], ["127.0.0.1"]])
    with host(WITH_LENGTH) as pictures:
        url = f"http://pictures.test:{pictures.port}/"
        assert fetched(url, resolve=lambda *_: next(answers)) == FILE
    assert next(answers) == ["127.0.0.1"], "it was asked more than once"


def test_a_redirect_asks_again_and_checks_again(secret: Host) -> None:
    answers = iter([[OPEN], ["127.0.0.1"]])
    with host(redirects("/elsewhere")) as pictures:
        url = f"http://pictures.test:{pictures.port}/"
        refused(url, "not on the open internet", resolve=lambda *_: next(answers))


def test_redirects_lead_to_the_file_and_not_on_for_ever() -> None:
    def answer(peer: socket.socket, request: bytes) -> None:
        first = request.startswith(b"GET /first ")
        (redirects("second?x=1") if first else WITH_LENGTH)(peer, request)

    with host(answer) as pictures:
        assert fetched(f"http://pictures.test:{pictures.port}/first") == FILE
    assert pictures.requests[1].startswith(b"GET /second?x=1 ")
    with host(redirects("/again")) as pictures:
        refused(f"http://pictures.test:{pictures.port}/", "redirects more than 5 times")
    assert pictures.connections == 6


def endless(peer: socket.socket, _: bytes) -> None:
    peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        peer.sendall(bytes(65536))


def test_a_file_without_an_end_stops_at_the_limit() -> None:
    with host(endless) as pictures:
        refused(f"http://pictures.test:{pictures.port}/", "the limit is 1048576")


def test_a_file_that_says_it_is_too_large_is_not_read() -> None:
    answer = sends(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n")
    with host(answer) as pictures:
        refused(f"http://pictures.test:{pictures.port}/", "the limit is 1048576")


@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=repr
)
def test_a_slow_drip_ends_with_the_total_time(begin: bytes) -> None:
    left = threading.Event()

    def drip(peer: socket.socket, _: bytes) -> None:
        try:
            peer.sendall(begin)
            while True:
                peer.sendall(b"x")
                time.sleep(0.02)  # the drip itself, no wait for anything
        finally:
            left.set()

    with host(drip) as pictures:
        url = f"http://pictures.test:{pictures.port}/"
        refused(url, "longer than 0.5 s", timeout_s=0.5)
        assert left.wait(30)


def test_a_server_that_says_nothing_ends_with_the_total_time() -> None:
    with host(lambda peer, _: peer.recv(1) and None) as pictures:
        refused(f"http://pictures.test:{pictures.port}/", "longer than 0.3 s", timeout_s=0.3)


def test_a_handshake_that_never_ends_does() -> None:
    with host(lambda peer, _: None) as pictures:
        # It reads the first message of the handshake and says nothing: no header ever ends.
        refused(f"https://pictures.test:{pictures.port}/", "longer than 0.3 s", timeout_s=0.3)


def test_a_resolver_that_never_answers_is_not_waited_for() -> None:
    answer = threading.Event()
    refused(
        "http://pictures.test/",
        "longer than 0.3 s",
        resolve=lambda *_: answer.wait(60) and [] or [],
        timeout_s=0.3,
    )
    answer.set()


@pytest.mark.parametrize(
    "answer, match",
    [
        (sends(b"HTTP/1.1 404 Not Found\r\n\r\n" + SECRET), "answered with status 404"),
        (sends(b"HTTP/1.1 500 " + SECRET + b"\r\n\r\n"), "answered with status 500"),
        (sends(SECRET + b"\r\n\r\n"), "does not speak HTTP"),
        (sends(b"HTTP/1.1 200 OK\r\n" + SECRET * 9000 + b"\r\n\r\n"), "does not speak HTTP"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + SECRET), "does not speak HTTP"),
        (sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET), "HTTP|broke"),
        (sends(b"HTTP/1.1 302 Found\r\n\r\n" + SECRET), "answered with status 302"),
        (sends(b"HTTP/1.1 302 Found\r\nLocation: http://[" + SECRET + b"\r\n\r\n"), "be read"),
        (sends(), "does not speak HTTP|broke off"),
        (sends(b"HTTP/1.1 200 OK\r\n\r\n"), "it is empty"),
    ],
)
def test_errors_name_the_cause_and_repeat_nothing(answer: Answer, match: str) -> None:
    with host(answer) as pictures:
        refused(f"http://pictures.test:{pictures.port}/", match)


def test_what_is_no_server_says_so() -> None:
    with socket.create_server((OPEN, 0)) as listener:
        port = listener.getsockname()[1]
    refused(f"http://pictures.test:{port}/", "cannot be reached")
    refused("http://unknown.test/", "is not known")
    refused("http://pictures.test:99999/", "cannot be read")
    refused("http:///path", "must name a host")
    refused("http://user:word@pictures.test/", "without a user or a password")
    refused(f"https://pictures.test:{port}/", "cannot be reached")


def test_a_certificate_that_nobody_vouches_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with host(WITH_LENGTH, tls=context) as pictures:
        url = f"https://pictures.test:{pictures.port}/"
        refused(url, "no safe connection")
        refused(url.replace("pictures.test", "other.test"), "no safe connection", resolve=everyone)
        # With one that is vouched for, the same file comes, and still only under its own name.
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert fetched(url) == FILE
        refused(url.replace("pictures.test", "other.test"), "no safe connection", resolve=everyone)
    assert len(pictures.requests) == 1


def everyone(name: str, port: int) -> list[str]:
    return [OPEN]


def test_data_urls_hold_the_file() -> None:
    text = base64.b64encode(FILE).decode()
    for url in (
        f"data:image/png;base64,{text}",
        f"DATA:;BASE64,{text[:40]}\n{text[40:]}",
        f"data:image/png;base64,{text.replace('+', '%2B')}",
        "data:," + "".join(f"%{byte:02x}" for byte in FILE),
    ):
        assert Fetcher(False).fetch(ImageRef(url=url), Deadline(5)) == FILE


@pytest.mark.parametrize(
    "url, match",
    [
        ("data:image/png;base64,", "it is empty"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AA*A", "not valid base64"),
        ("data:image/png;base64,AAAA\u00e9", "not valid base64"),
        ("data:image/png;base64", "no comma"),
        ("data:,", "it is empty"),
        ("data:image/png;base64," + "A" * (1 << 21), "the limit is 1048576"),
        ("", "it is empty"),
    ],
)
def test_bad_data_urls_say_what_is_wrong(url: str, match: str) -> None:
    refused(url, match)


def test_bytes_are_the_file_within_the_limit() -> None:
    assert Fetcher(False).fetch(ImageRef(data=FILE), Deadline(5)) == FILE
    with pytest.raises(ImageError, match=f"it has {len(FILE)} bytes, the limit is 100"):
        Fetcher(False, max_bytes=100).fetch(ImageRef(data=FILE), Deadline(5))
