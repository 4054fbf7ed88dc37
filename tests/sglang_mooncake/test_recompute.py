# SPDX-License-Identifier: Apache-2.0
"""Asking prefill servers to compute KV again, over real sockets."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from handover import WAIT_S, until

from sglang_mooncake.sglang import recompute
from sglang_mooncake.sglang.recompute import Recompute


def wanted() -> bool:
    return True


@contextmanager
def prefill_server(status: int, free: threading.Event) -> Iterator[tuple[str, list[object]]]:
    """Answers POST /generate with `status` once `free`; its address, and what it was asked."""
    asked: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            assert free.wait(60)
            self.send_response(status)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"oops")

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # all of them connect at once

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", asked
    finally:
        free.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "says"), [(200, None), (503, "answered 503: oops")])
def test_the_prefill_server_is_asked_and_its_refusal_told(status, says):
    free, failures = threading.Event(), queue.Queue()
    free.set()
    with (
        prefill_server(status, free) as (address, asked),
        closing(Recompute(60.0, "T")) as requests,
    ):
        requests.ask(address, {"rid": "a"}, wanted, failures.put)
        if says is None:
            until(lambda: len(requests) == 0, "the request is over")
            assert failures.empty()
        else:
            assert says in failures.get(timeout=WAIT_S)
        assert asked == [("/generate", {"rid": "a"})]


def test_a_server_that_is_not_there_is_told():
    failures: queue.Queue[str] = queue.Queue()
    with closing(Recompute(60.0, "T")) as requests:
        requests.ask("127.0.0.1:1", {}, wanted, failures.put)
        assert "the prefill server at 127.0.0.1:1 cannot be reached" in failures.get(timeout=WAIT_S)


def test_what_cannot_be_sent_ends_its_room():
    failures: queue.Queue[str] = queue.Queue()
    with closing(Recompute(60.0, "T")) as requests:
        requests.ask("127.0.0.1:1", {"no json": object()}, wanted, failures.put)
        assert "internal error" in failures.get(timeout=WAIT_S)


def test_requests_are_bounded_in_number_and_in_threads(monkeypatch):
    monkeypatch.setattr(recompute, "REQUESTS_MAX", recompute.WORKERS + 2)
    free, failures = threading.Event(), queue.Queue()
    with prefill_server(200, free) as (address, asked), closing(Recompute(60.0, "T")) as requests:
        for number in range(recompute.WORKERS + 3):
            requests.ask(address, {"number": number}, wanted, failures.put)
        assert f"{recompute.WORKERS + 2} retracted requests wait" in failures.get_nowait()
        until(lambda: len(asked) == recompute.WORKERS, "all threads are taken")
        free.set()
        until(lambda: len(requests) == 0, "all are over")
        assert not list(failures.queue)
        assert len(asked) == recompute.WORKERS + 2


def test_what_nobody_wants_any_more_when_its_turn_comes_is_not_computed():
    free, failures, wants = threading.Event(), queue.Queue(), [True] * recompute.WORKERS + [False]
    with prefill_server(200, free) as (address, asked), closing(Recompute(60.0, "T")) as requests:
        for number, want in enumerate(wants):
            requests.ask(address, {"number": number}, lambda want=want: want, failures.put)
        until(lambda: len(asked) == recompute.WORKERS, "all threads are taken")
        free.set()
        until(lambda: len(requests) == 0, "all are over")
        assert not list(failures.queue)
        assert len(asked) == recompute.WORKERS


def test_the_time_in_the_queue_counts():
    """Who waits behind others for as long as a request may take is told so, and nobody is asked."""
    free, failures, now_s = threading.Event(), queue.Queue(), [0.0]
    with prefill_server(200, free) as (address, asked), closing(Recompute(60.0, "T")) as requests:
        requests._workers._clock = lambda: now_s[0]
        for number in range(recompute.WORKERS):
            requests.ask(address, {"number": number}, wanted, failures.put)
        until(lambda: len(asked) == recompute.WORKERS, "all threads are taken")
        requests.ask(address, {"number": "late"}, wanted, failures.put)
        now_s[0] = 61.0
        free.set()
        assert failures.get(timeout=WAIT_S) == (
            "cannot recompute: the request waited 61 s behind 16 other retracted requests "
            "(T is 60 s)"
        )
        assert len(asked) == recompute.WORKERS


def test_whoever_is_told_of_a_full_queue_may_ask_again(monkeypatch):
    """As a callback may: it must not be called under a lock."""
    monkeypatch.setattr(recompute, "REQUESTS_MAX", 0)
    failures: list[str] = []
    with closing(Recompute(60.0, "T")) as requests:

        def failed(reason: str) -> None:
            failures.append(reason)
            if len(failures) < 2:
                requests.ask("127.0.0.1:1", {}, wanted, failed)

        requests.ask("127.0.0.1:1", {}, wanted, failed)
    assert len(failures) == 2
