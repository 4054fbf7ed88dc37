# SPDX-License-Identifier: Apache-2.0
"""What strangers send as text: heads, bodies and JSON that are none, and what is logged of them."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import sys
from collections.abc import Callable

import msgspec
import pytest
import requests
from bootstrap_http import get, route_body, url
from bootstrap_waits import NEVER_S, WAIT_S
from test_bootstrap_client_server import stranger

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    RankCoords,
    RankRecord,
    Topology,
)
from bootstrap_server.admission import refusals
from bootstrap_server.admission.connections import (
    FIELD_BYTES_MAX,
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    _FirstHead,
)
from bootstrap_server.admission.refusals import LOG_EVERY_S, SILENCE_S, Pace, Refusals
from bootstrap_server.decoding import EXCERPT_CHARS_MAX, BadText, decoded, excerpt
from bootstrap_server.http.rank_lines import BURST
from bootstrap_server.ranks.rank_status import RankStatus

KEY = b"k" * 32
ENDLESS = b"1" * 400
MakeRecord = Callable[..., RankRecord]
STATUS = msgspec.json.Decoder(RankStatus)


def talk(server: BootstrapServer, *parts: bytes) -> bytes:
    """All that is answered; a part is sent once something was answered to the one before."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as one:
        answer = b""
        for part in parts:
            one.sendall(part)
            answer += one.recv(1 << 16)
        while some := one.recv(1 << 16):
            answer += some
        return answer


# --- JSON ---


@pytest.mark.pure
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"rates": [["\xff", 1, 1]]}',
        b'{"rooms": {"\xff": 1}}',
        b'{"x": ' + b"[" * 100_000,
        b'{"version": ' + ENDLESS + b"}",
        b'{"rooms": {"done": ' + ENDLESS + b"}}",
        b'{"rates": [["tcp", ' + ENDLESS + b", 1]]}",
        b'{"rates": [["tcp", NaN, 1]]}',
        b'{"peers": [["a", "b", [' + ENDLESS * 10 + b', 0, 0, 0], [1, 1, 1, 1], "tcp", 1]]}',
    ],
)
def test_whatever_is_no_json_of_that_form_is_one_error(text: bytes) -> None:
    with pytest.raises(BadText) as caught:
        decoded(STATUS, text)
    assert 0 < len(str(caught.value)) <= EXCERPT_CHARS_MAX


@pytest.mark.pure
def test_a_number_that_no_float_holds_is_out_of_range_as_any_other() -> None:
    with pytest.raises(ValueError, match=r"peers_total is 1000\d*, outside"):
        RankStatus(peers_total=10**400)
    with pytest.raises(ValueError, match="peers_total is nan, outside"):
        RankStatus(peers_total=float("nan"))  # type: ignore[arg-type]


@pytest.mark.pure
def test_excerpts_are_short_and_printable() -> None:
    assert excerpt("rank\n7\x00") == "rank 7 "
    long = excerpt("x" * 10_000_000)
    assert (len(long), long[-2:]) == (EXCERPT_CHARS_MAX, "x…")
    assert excerpt("x" * EXCERPT_CHARS_MAX) == "x" * EXCERPT_CHARS_MAX


def test_text_that_is_not_utf8_is_a_bad_body(
    server: BootstrapServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps(route_body(rank_ip="?")).encode().replace(b"?", b"\xff")
    answer = requests.put(url(server, "/route"), data=body, timeout=WAIT_S)
    assert (answer.status_code, answer.text[:21]) == (400, "PUT /route: bad body:")
    assert "can't decode" in answer.text
    assert not caplog.records


def test_what_a_false_server_writes_is_quoted_in_part() -> None:
    with (
        stranger(409, b'{"error": "' + b"x" * (1 << 20) + b'"}') as address,
        BootstrapClient(address, WAIT_S) as client,
        pytest.raises(BootstrapError) as caught,
    ):
        client.instance()
    assert len(str(caught.value)) < 2 * EXCERPT_CHARS_MAX


# --- bodies ---


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP", "x\xff"])
def test_bodies_are_taken_as_they_are(server: BootstrapServer, encoding: str) -> None:
    answer = requests.put(
        url(server, "/route"),
        data=gzip.compress(json.dumps(route_body()).encode()),
        headers={"Content-Encoding": encoding.encode("latin-1")},
        timeout=WAIT_S,
    )
    assert answer.status_code == 415
    assert "without Content-Encoding" in answer.text
    assert get(server, "/v1/instances").json()["default"]["registered"] == 0


@pytest.mark.parametrize(("method", "status"), [("PUT /route", 401), ("GET /health", 200)])
def test_nothing_of_a_stranger_is_unpacked(
    method: str, status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor complained of: this is no gzip."""
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    head = f"{method} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n"
    with BootstrapServer(host="127.0.0.1", port=0, keys=[KEY]) as server:
        for _ in range(3):
            assert talk(server, head.encode() + b"no gzip. ")[:12] == f"HTTP/1.1 {status}".encode()
    assert len([record for record in caplog.records if record.levelno > logging.INFO]) <= 1
    assert not [record for record in caplog.records if record.exc_info]


# --- heads ---


@pytest.mark.pure
def test_a_first_head_is_bounded_wherever_its_packets_end() -> None:
    whole = b"GET / HTTP/1.1\r\n".ljust(HEAD_BYTES_MAX - 4, b"x") + b"\r\n\r\n"
    for size in (1, 7, HEAD_BYTES_MAX - 1, HEAD_BYTES_MAX):
        head = _FirstHead()
        for at in range(0, HEAD_BYTES_MAX, size):
            assert not head.is_whole
            assert head.takes(whole[at : at + size])
        assert head.is_whole
    # A body may come with it.
    head = _FirstHead()
    assert head.takes(whole + b"x" * (1 << 20))
    assert head.is_whole
    # One byte more is too many.
    long = b"x" + whole
    assert not _FirstHead().takes(long)
    head = _FirstHead()
    assert head.takes(long[:-1])
    assert not head.takes(long[-1:])


def test_a_head_that_grows_and_grows_is_refused(
    server: BootstrapServer, caplog: pytest.LogCaptureFixture
) -> None:
    field = b"X-A: " + b"x" * 1000 + b"\r\n"
    answer = talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\n" + field * 9)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"longer than 8192 bytes" in answer
    assert [record.name for record in caplog.records] == ["bootstrap_server.admission.refusals"]


def test_later_heads_are_bounded_too(server: BootstrapServer) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for much in (
        b"X-A: " + b"x" * (FIELD_BYTES_MAX + 1),
        b"X-%d: x\r\n" % 1 * (FIELDS_MAX + 1),
    ):
        answer = talk(server, first, b"GET /health HTTP/1.1\r\nHost: x\r\n" + much + b"\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200 OK") == 1
        assert b" 400 Bad Request" in answer


# --- the log ---


@pytest.mark.pure
def test_a_line_about_a_stranger_is_short(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().note("10.0.0.9", "x" * 10_000_000)
    (message,) = caplog.messages
    assert len(message) < 2 * EXCERPT_CHARS_MAX


@pytest.mark.pure
def test_who_goes_on_for_five_minutes_gets_few_lines() -> None:
    now_s = [0.0]
    pace = Pace(burst=2, clock=lambda: now_s[0])
    written = []
    for second in range(300):
        now_s[0] = float(second)
        asked = [pace.left_out() for _ in range(10)]
        written += [(second, left_out) for left_out in asked if left_out is not None]
    assert [second for second, _ in written] == [0, 0, 5, 15, 35, 75, 155]
    assert sum(left_out for _, left_out in written) == 10 * 155 + 1 - len(written)
    # After a silence the next one is written, however many there were before.
    now_s[0] += SILENCE_S
    assert pace.left_out() == 10 * 145 - 1
    assert pace.left_out() == 0
    assert pace.left_out() is None


def test_a_line_ends_with_how_many_were_left_out() -> None:
    now_s = 0.0
    pace = Pace(clock=lambda: now_s)
    assert [pace.more() for _ in range(3)] == ["", None, None]
    now_s = LOG_EVERY_S
    assert pace.more() == " (2 more such lines were left out)"


def test_ranks_of_strangers_do_not_fill_the_log(
    server: BootstrapServer,
    make_record: MakeRecord,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a secret: whoever has proved one may have as many lines as ranks."""
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    one = make_record(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0))
    with caplog.at_level(logging.INFO), requests.Session() as session:
        for number in range(2 * BURST):
            put = session.put(
                url(server, f"/v1/instances/stranger-{number}/ranks"),
                data=msgspec.json.encode(one),
                timeout=30,
            )
            assert put.status_code == 200
    assert len([one for one in caplog.messages if "registered from" in one]) == BURST


@pytest.mark.pure
def test_tracebacks_have_a_bounded_rate() -> None:
    now_s = [0.0]
    tracebacks = refusals._Tracebacks(lambda: now_s[0])
    try:
        raise KeyError("a bug")
    except KeyError:
        record = logging.makeLogRecord({"exc_info": sys.exc_info()})
    assert [tracebacks.may_be_logged(record) for _ in range(3)] == [True, False, False]
    now_s[0] += LOG_EVERY_S
    assert [tracebacks.may_be_logged(record) for _ in range(2)] == [True, False]


def test_refused_registrations_are_logged_at_a_bounded_rate(
    server: BootstrapServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    with requests.Session() as session:
        for width, status in ((2, 200), (4, 400), (4, 400), (4, 400)):
            body = route_body(attn_tp_size=width)
            assert session.put(url(server, "/route"), json=body, timeout=30).status_code == status
    assert len([one for one in caplog.messages if "refused a registration" in one]) == 1
    assert "start all ranks of an instance with the same value" in caplog.text
