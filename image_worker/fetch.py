"""From what a client gave — bytes, a data URL, an http(s) URL — to the bytes of a file.

A URL makes this machine ask another on a stranger's behalf. So: only http and https; the name is
resolved once for each hop, every address of it must be public, and the connection goes to the
address that was checked, whatever the name says a moment later; a redirect is a new hop. Bytes and
time are bounded, and no error repeats anything that came back.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, quote, unquote_to_bytes, urljoin, urlsplit

from deepinfer.image_worker.errors import Deadline, ImageError
from deepinfer.wire.checks import shown
from deepinfer.wire.messages import MAX_IMAGE_BYTES, ImageRef

_SCHEMES = ("http", "https")
_MAX_REDIRECTS = 5
_PIECE_BYTES = 1 << 16
_SAFE = "%/:=&?~#+!$,;'@()*[]"
_REDIRECTS = (301, 302, 303, 307, 308)
# RFC 6052: an IPv4 address inside an IPv6 one, which a gateway turns back.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], list[str]]
"""The addresses of a host and port; ``OSError`` when there are none."""


def resolve(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an address is a host of the open internet, also when it is written inside another."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if parsed in _NAT64:
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


class Fetcher:
    """Fetches images; http(s) URLs only when they are allowed.

    ``resolve`` and ``is_public`` are parameters for tests.
    """

    def __init__(
        self,
        allow_urls: bool,
        max_bytes: int = MAX_IMAGE_BYTES,
        resolve: Resolve = resolve,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        self._allow_urls = allow_urls
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._is_public = is_public

    def fetch(self, image: ImageRef, deadline: Deadline) -> bytes:
        """Return the file; ``ImageError`` says why there is none."""
        if image.url[:5].lower() == "data:":
            data = self._from_data_url(image.url)
        elif image.url:
            data = self._from_web(image.url, deadline)
        else:
            data = bytes(image.data)
        if not data:
            raise ImageError("it is empty")
        self._check_size(len(data))
        return data

    def _from_data_url(self, url: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma:
            raise ImageError("its data URL has no comma before the data")
        packed = head.lower().endswith(";base64")
        self._check_size(len(body) // 4 * 3 if packed else len(body) // 3)
        data = unquote_to_bytes(body)
        if not packed:
            return data
        try:
            return base64.b64decode(data.translate(None, b" \t\r\n"), validate=True)
        except (binascii.Error, ValueError):
            raise ImageError("its data URL is not valid base64") from None

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ImageError(f"it has {num_bytes} bytes, the limit is {self._max_bytes}")

    def _from_web(self, url: str, deadline: Deadline) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            parts = self._checked(url)
            answer = self._ask(parts, deadline)
            if isinstance(answer, bytes):
                return answer
            with suppress(ValueError):
                answer = urljoin(url, answer)
            url = answer
        raise ImageError(f"its URL redirects more than {_MAX_REDIRECTS} times")

    def _checked(self, url: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ImageError("its URL cannot be read") from None
        if parts.scheme not in _SCHEMES:
            raise ImageError(f"its URL must be http or https, got {shown(parts.scheme)}")
        if not self._allow_urls:
            raise ImageError("this engine does not fetch images; send the file itself")
        if not host or parts.username is not None or parts.password is not None:
            raise ImageError("its URL must name a host, without a user or a password")
        return parts

    def _ask(self, parts: SplitResult, deadline: Deadline) -> bytes | str:
        """One hop: the file, or where it is said to be."""
        host = str(parts.hostname)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            addresses = self._addresses(host, port, deadline)
            with _connection(addresses, port, deadline) as open_socket:
                if parts.scheme == "https":
                    open_socket.start_tls(host)
                return self._exchange(open_socket.socket, parts, deadline)
        except ImageError:
            raise
        except ssl.SSLError:
            reason = "there is no safe connection to it"
        except http.client.HTTPException:
            reason = "its server does not speak HTTP properly"
        except (OSError, UnicodeError, ValueError):
            reason = "its server cannot be reached, or broke off"
        deadline.check()  # a connection that the deadline cut ends in any of these
        raise ImageError(f"{reason} ({shown(host)})")

    def _addresses(self, host: str, port: int, deadline: Deadline) -> list[str]:
        """The host's addresses, all of them public."""
        found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                found.put(self._resolve(host, port))
            except (OSError, UnicodeError):
                found.put([])

        # A thread, because a resolver takes as long as it likes and cannot be told to stop.
        threading.Thread(target=ask, name="resolver", daemon=True).start()
        try:
            addresses = found.get(timeout=deadline.remaining_s())
        except queue.Empty:
            addresses = []
            deadline.check()
        if not addresses:
            raise ImageError(f"its host {shown(host)} is not known")
        if not all(self._is_public(address) for address in addresses):
            raise ImageError(f"its host {shown(host)} is not on the open internet")
        return addresses

    def _exchange(
        self, pinned: socket.socket, parts: SplitResult, deadline: Deadline
    ) -> bytes | str:
        connection = http.client.HTTPConnection(str(parts.hostname), timeout=deadline.timeout_s)
        connection.sock = pinned
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {
            "Host": parts.netloc,
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "User-Agent": "deepinfer",
            "Connection": "close",
        }
        connection.putrequest(
            "GET", quote(target, safe=_SAFE), skip_host=True, skip_accept_encoding=True
        )
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        # It holds the socket as well: left open, the server would go on sending to it.
        with connection.getresponse() as response:
            if response.status in _REDIRECTS and (location := response.getheader("Location")):
                return location
            if response.status != 200:
                raise ImageError(f"its server answered with status {response.status}")
            length = response.getheader("Content-Length", "")
            if length.isascii() and length.isdecimal():
                self._check_size(int(length[:20]))
            data = bytearray()
            while piece := response.read1(_PIECE_BYTES):
                data += piece
                self._check_size(len(data))
                deadline.check()
            deadline.check()  # when the deadline cut the connection, it looks like its end
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            return bytes(data)


class _Connection:
    """A socket that the deadline shuts, whatever waits on it."""

    def __init__(self, plain: socket.socket) -> None:
        self.socket = plain

    def start_tls(self, host: str) -> None:
        self.socket = ssl.create_default_context().wrap_socket(
            self.socket, server_hostname=host, do_handshake_on_connect=False
        )
        # Only now: the deadline must have the socket that the handshake waits on.
        self.socket.do_handshake()

    def shut(self) -> None:
        with suppress(OSError):
            # The method of the plain class: that of TLS would first say goodbye to the peer.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


@contextmanager
def _connection(addresses: list[str], port: int, deadline: Deadline) -> Iterator[_Connection]:
    """Connect to the first address that answers, and to no other than these.

    Time limits of single reads would let a server that sends a byte now and then go on for ever.
    """
    plain = None
    for address in addresses:
        with suppress(OSError):
            plain = socket.create_connection((address, port), timeout=deadline.remaining_s())
            break
    if plain is None:
        raise ConnectionError("no address answers")
    connection = _Connection(plain)
    timer = threading.Timer(deadline.remaining_s(), connection.shut)
    timer.daemon = True
    timer.start()
    try:
        yield connection
    finally:
        timer.cancel()
        connection.socket.close()
