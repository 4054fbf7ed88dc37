# SPDX-License-Identifier: Apache-2.0
"""The ranks' own HTTP against servers that behave as servers do."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

import pytest
from bootstrap_waits import WAIT_S

from bootstrap_server import BootstrapError, Unreachable
from bootstrap_server.client import deadline
from bootstrap_server.client import http as http_client
from bootstrap_server.client.http import HttpClient


@contextmanager
def script(*connections: list[bytes]) -> Iterator[str]:
    """A server that answers the n-th connection's requests with these bytes, then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answers in connections:
                connection, _ = listener.accept()
                with connection:
                    for answer in answers:
                        asked = b""
                        while b"\r\n\r\n" not in asked:
                            part = connection.recv(65536)
                            assert part
                            asked += part
                        connection.sendall(answer)

        listener.settimeout(WAIT_S)
        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            yield f"127.0.0.1:{listener.getsockname()[1]}"
            served.result(timeout=60)


def answer(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_connection_is_kept_and_opened_again_when_the_server_closed_it() -> None:
    with script([answer(b"one"), answer(b"two")], [answer(b"three")]) as address:
        client = HttpClient(address, WAIT_S)
        assert [client.request("GET", "/") for _ in range(3)] == [
            (200, b"one"),
            (200, b"two"),
            (200, b"three"),
        ]
        client.close()
        client.close()


def test_a_connection_that_the_server_announces_to_close_is_not_asked_again() -> None:
    with script([answer(b"one", "Connection: close")], [answer(b"two")]) as address:
        client = HttpClient(address, WAIT_S)
        assert [client.request("PUT", "/", b"{}")[1] for _ in range(2)] == [b"one", b"two"]
        client.close()


def test_compressed_answers() -> None:
    body = b"x" * 300_000
    packed = answer(gzip.compress(body), "Content-Encoding: gzip")
    with script([packed, answer(b"plain")]) as address:
        client = HttpClient(address, WAIT_S)
        assert client.request("GET", "/") == (200, body)
        assert client.request("GET", "/") == (200, b"plain")
        client.close()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (answer(b"half", length=10), "IncompleteRead"),
        (
            answer(gzip.compress(b"x" * 99, mtime=0)[:-9], "Content-Encoding: gzip"),
            "IncompleteRead",
        ),
        (answer(b"not gzip", "Content-Encoding: gzip"), "incorrect header"),
        (b"\x00\x00\x00\r\n\r\n", "\\\\x00"),
        (CHUNKED + b"-5\r\nhalf\r\n", "ValueError"),
        (b"", "closed connection"),
    ],
)
def test_answers_that_break_off_are_unreachable_and_harm_no_later_one(
    broken: bytes, words: str
) -> None:
    with script([broken], [answer(b"whole")]) as address:
        client = HttpClient(address, WAIT_S)
        with pytest.raises(Unreachable, match=words) as caught:
            client.request("GET", "/")
        assert address in str(caught.value)
        assert client.request("GET", "/") == (200, b"whole")
        client.close()


def test_a_small_answer_that_unpacks_into_a_large_one_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES_MAX", 1 << 17)
    bomb = answer(gzip.compress(bytes(1 << 24)), "Content-Encoding: gzip")
    with script([bomb]) as address:
        client = HttpClient(address, WAIT_S)
        with pytest.raises(BootstrapError, match="more than 131072 bytes"):
            client.request("GET", "/")


def test_a_chunk_of_less_than_no_bytes_is_not_read_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``http.client`` reads one of -1 bytes until the connection ends."""
    monkeypatch.setattr(deadline, "ANSWER_BYTES_MAX", 1 << 17)
    monkeypatch.setattr(deadline, "AROUND_BYTES_MAX", 1 << 10)
    with script([CHUNKED + b"-1\r\n" + bytes(1 << 18)], [answer(b"whole")]) as address:
        client = HttpClient(address, WAIT_S)
        with pytest.raises(Unreachable, match="longer than any that is expected"):
            client.request("GET", "/")
        assert client.request("GET", "/") == (200, b"whole")
        client.close()


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = HttpClient(f"127.0.0.1:{listener.getsockname()[1]}", 0.05)
        with pytest.raises(Unreachable, match="timed out"):
            client.request("GET", "/", wait_s=0.05)


HEADERS = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize("at_once", [b"HTTP", HEADERS], ids=["headers", "body"])
def test_an_answer_in_drops_is_given_up_at_the_deadline(at_once: bytes) -> None:
    """Each byte comes well within the timeout; they would go on for hours."""
    given_up = threading.Event()

    def drip(connection: socket.socket) -> None:
        try:
            connection.sendall(at_once)
            while not given_up.wait(0.01):
                connection.sendall(b"x")
        except OSError:
            pass  # the client has hung up

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = HttpClient(f"127.0.0.1:{listener.getsockname()[1]}", WAIT_S)
        asked = pool.submit(client.request, "GET", "/")
        listener.settimeout(WAIT_S)
        connection, _ = listener.accept()
        connection.sendall(answer(b"one"))
        assert asked.result(timeout=WAIT_S) == (200, b"one")
        # From now on, over a connection that is there: to make one takes of the deadline, too.
        client._timeout_s = 0.1
        asked = pool.submit(client.request, "GET", "/", wait_s=0.1)
        dripping = threading.Thread(target=drip, args=(connection,))
        dripping.start()
        try:
            with pytest.raises(Unreachable, match="timed out"):
                asked.result(timeout=WAIT_S)
        finally:
            given_up.set()
            dripping.join()
            connection.close()


class Cut(deadline._DeadlineSocket):
    """A way on which the first attempts are not answered."""

    left = 0
    waits_s: ClassVar[list[float | None]] = []

    def connect(self, address: object) -> None:
        if not Cut.left:
            super().connect(address)  # type: ignore[arg-type]
            return
        Cut.left -= 1
        Cut.waits_s.append(self.gettimeout())
        raise TimeoutError("timed out")


def test_a_server_that_does_not_answer_is_dialled_anew_and_not_when_tcp_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline, "_DeadlineSocket", Cut)
    monkeypatch.setattr(Cut, "left", 3)
    monkeypatch.setattr(Cut, "waits_s", [])
    with script([answer(b"back")]) as address:
        client = HttpClient(address, WAIT_S)
        assert client.request("GET", "/") == (200, b"back")
        client.close()
    assert Cut.waits_s == [deadline.DIAL_S] * 3


def test_a_server_that_never_answers_is_dialled_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline, "_DeadlineSocket", Cut)
    monkeypatch.setattr(Cut, "left", -1)
    with pytest.raises(Unreachable, match="timed out"):
        HttpClient("127.0.0.1:9", 0.05).request("GET", "/")
