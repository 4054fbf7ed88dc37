# SPDX-License-Identifier: Apache-2.0
"""The store's questions to a registry that has the secret and answers what no registry would. (With
a real one: test_kvstore_members.py.)"""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from store_makers import TIMEOUT_S, until
from store_redis import KEYS

from bootstrap_server.admission.proof import HEADER, RequestProof, prove_answer
from bootstrap_server.client import http as http_client
from bootstrap_server.ranks.errors import BootstrapError
from kvstore.membership import members
from kvstore.membership.index_registry import RegistryIndex
from kvstore.membership.members import Members

HOST = "127.0.0.1"
NAME = "0" * 31 + "1"
RIGHT = b'{"revision": 1, "entries": ["%s %s tcp://127.0.0.1:4711"]}' % (
    NAME.encode(),
    members._key_id(KEYS.control[0]).encode(),
)
ODD_ANSWERS = {
    "no JSON": b"<html>",
    "nothing": b"",
    "a list": b"[1, []]",
    "no object": b"null",
    "without a revision": b'{"entries": []}',
    "a text for a revision": b'{"revision": "1"}',
    "no revision that there can be": b'{"revision": -1}',
    "a number that nothing holds": b'{"revision": 1e999}',
    "an object of entries": b'{"revision": 1, "entries": {"a": "b"}}',
    "an entry that is a number": b'{"revision": 1, "entries": ["a", 1]}',
    "an entry that is not UTF-8": b'{"revision": 1, "entries": ["\xff"]}',
    "half a character": b'{"revision": 1, "entries": ["\\ud800"]}',
    "nested too deeply": b'{"revision": 1, "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "two answers": RIGHT * 2,
}


class Registry:
    """Proves whatever it is to answer."""

    answer = b""
    url = ""


@contextmanager
def registry(answer: bytes) -> Iterator[Registry]:
    """One that runs."""
    made = Registry()
    made.answer = answer

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked, said = RequestProof.parse(self.headers[HEADER]), made.answer
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.send_header(HEADER, prove_answer(KEYS.registry[0], asked, 200, "", said))
            self.end_headers()
            self.wfile.write(said)

        def do_DELETE(self) -> None:
            self.do_PUT()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((HOST, 0), Handler) as server:
        made.url = f"registry://{HOST}:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def why_not(odd: bytes) -> str:
    """What is said of an answer, which counts as none."""
    with registry(odd) as made:
        index = RegistryIndex(made.url, TIMEOUT_S, 10.0, KEYS.registry)
        with pytest.raises(BootstrapError) as told:
            index.exchange(NAME, b"an entry", b"")
        assert isinstance(told.value, index.errors)
        made.answer = RIGHT
        assert index.exchange(NAME, b"an entry", b"")[0] == b"1", "the next one is an answer"
        index.close()
    return str(told.value)


@pytest.mark.parametrize("odd", ODD_ANSWERS)
def test_answers_of_another_shape_are_none(odd: str) -> None:
    assert "the registry answers what cannot be read: " in why_not(ODD_ANSWERS[odd])


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES_MAX", 1 << 20)
    said = why_not(RIGHT + b" " * (1 << 20))
    assert "answers with more than 1048576 bytes, so it is not the registry" in said


def test_of_who_leaves_no_answer_is_read() -> None:
    with registry(b"<html>") as made:
        index = RegistryIndex(made.url, TIMEOUT_S, 10.0, KEYS.registry)
        index.leave(NAME, b"an entry")
        index.close()


def test_answers_that_cannot_be_read_cost_nothing_but_new_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(members, "PERIOD_S", 0.02)
    with registry(RIGHT) as made:
        ours = Members(made.url, HOST, KEYS)
        assert list(ours.endpoints()) == [NAME]
        for odd in ("a list", "an entry that is not UTF-8", "nested too deeply"):
            caplog.clear()
            made.answer = ODD_ANSWERS[odd]
            until(lambda: ours._is_away, odd)
            assert "cannot be asked (the registry answers what cannot be read: " in caplog.text
            assert list(ours.endpoints()) == [NAME], "what was known is known"
            made.answer = RIGHT
            until(lambda: not ours._is_away, "it is asked on")
        ours.close()


def test_a_defect_of_an_index_does_not_end_the_renewals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(members, "PERIOD_S", 0.02)
    with registry(RIGHT) as made:
        ours = Members(made.url, HOST, KEYS)
        with monkeypatch.context() as broken:
            broken.setattr(RegistryIndex, "exchange", lambda *_: {}["a key"])
            until(lambda: ours._is_away, "it is noticed")
        assert caplog.text.count("cannot be asked") == 1
        assert "KeyError: 'a key'" in caplog.text, "with where it was raised"
        until(lambda: not ours._is_away, "it is asked on")
        ours.close()
