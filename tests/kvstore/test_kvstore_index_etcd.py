# SPDX-License-Identifier: Apache-2.0
"""The store's questions to etcd, where what answers is no etcd. (With a real one:
test_kvstore_members.py.)"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from kvstore.membership.index_etcd import EtcdIndex

TIMEOUT_S = 0.2
MUCH_LATER_S = 30.0


@pytest.mark.parametrize(
    "at_once",
    [b"HTTP", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"],
    ids=["head", "body"],
)
def test_an_answer_in_drops_is_given_up_at_the_deadline(at_once: bytes) -> None:
    """Each byte comes well within the timeout; they would go on for hours. Whoever leaves the
    store's index waits for the question under way."""
    given_up = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the store has hung up
            connection.sendall(at_once)
            until_s = time.monotonic() + MUCH_LATER_S
            while not given_up.wait(TIMEOUT_S / 20) and time.monotonic() < until_s:
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        index = EtcdIndex(f"etcd://127.0.0.1:{listener.getsockname()[1]}", TIMEOUT_S, 2.0)
        try:
            with pytest.raises(TimeoutError):
                index.exchange("a", b"", b"")
        finally:
            given_up.set()
            index.close()
            thread.join(MUCH_LATER_S)


def test_a_chunk_of_less_than_no_bytes_is_no_answer() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhalf\r\n"

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not connection.recv(1 << 16).endswith(b"}"):
                pass
            connection.sendall(chunked)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"etcd://127.0.0.1:{listener.getsockname()[1]}"
        index = EtcdIndex(url, MUCH_LATER_S, 2.0)
        with pytest.raises(index.errors, match="read length"):
            index.exchange("a", b"", b"")
        index.close()
        thread.join(MUCH_LATER_S)
