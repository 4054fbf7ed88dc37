# SPDX-License-Identifier: Apache-2.0
"""Answers of servers, taken apart as their bytes come, in whatever pieces that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.router.http1 import (
    HEAD_BYTES_MAX,
    AnswerError,
    AnswerParser,
    Head,
    request_head,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: Chunked\r\n\r\n"


def taken(parser: AnswerParser, raw: bytes, cuts: list[int]) -> bytes:
    body, at = b"", 0
    for cut in sorted({*(one % (len(raw) + 1) for one in cuts), len(raw)}):
        body += parser.take(raw[at:cut])
        at = cut
    return body


def as_chunks(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part)


CUTS = st.lists(st.integers(0, 10_000), max_size=20)


@given(parts=st.lists(st.binary(max_size=40), max_size=5), cuts=CUTS, trailer=st.booleans())
def test_a_body_in_chunks_is_whole_in_whatever_pieces_it_comes(
    parts: list[bytes], cuts: list[int], trailer: bool
) -> None:
    end = b"0;last\r\nX-Sum: 1\r\n\r\n" if trailer else b"0\r\n\r\n"
    parser = AnswerParser()
    assert taken(parser, CHUNKED + as_chunks(parts) + end, cuts) == b"".join(parts)
    assert (parser.is_over, parser.keeps) == (True, True)
    parser.end()


@given(body=st.binary(max_size=60), cuts=CUTS, more=st.sampled_from([b"", b"x"]))
def test_a_body_of_a_length_ends_there(body: bytes, cuts: list[int], more: bytes) -> None:
    raw = OK + b"content-length: %d\r\nX-A: \t b c \r\n\r\n" % len(body) + body
    parser = AnswerParser()
    assert taken(parser, raw + more, cuts) == body
    assert parser.head is not None
    assert parser.head.length == len(body)
    assert parser.head.headers[1] == ("X-A", "b c")
    assert (parser.is_over, parser.keeps) == (True, not more), "what was not asked for"


@given(body=st.binary(max_size=60), cuts=CUTS)
def test_a_body_without_a_length_lasts_until_the_connection_ends(
    body: bytes, cuts: list[int]
) -> None:
    parser = AnswerParser()
    assert taken(parser, OK + b"\r\n" + body, cuts) == body
    assert not parser.is_over
    parser.end()
    assert (parser.is_over, parser.keeps) == (True, False)


@given(cut=st.integers(0, 200))
def test_a_part_of_an_answer_is_none(cut: int) -> None:
    for raw in (
        CHUNKED + as_chunks([b"abc", b"de"]) + b"0\r\n\r\n",
        OK + b"Content-Length: 20\r\n\r\n" + b"x" * 20,
    ):
        parser = AnswerParser()
        parser.take(raw[: cut % len(raw)])
        with pytest.raises(AnswerError, match="has closed the connection"):
            parser.end()


@pytest.mark.parametrize(
    ("raw", "keeps"),
    [
        (b"HTTP/1.1 204 \r\n\r\n", True),
        (b"HTTP/1.1 304\r\nContent-Length: 7\r\n\r\n", True),
        (b"HTTP/1.1 204 \r\n\r\nx", False),
        (OK + b"Content-Length: 0\r\nConnection: x, Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (CHUNKED + b"0\r\n\r\nx", False),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 \r\nA: b\r\n\r\n" + CHUNKED + b"0\r\n\r\n",
            True,
        ),
    ],
)
def test_when_a_connection_may_be_used_again(raw: bytes, keeps: bool) -> None:
    parser = AnswerParser()
    assert parser.take(raw) == b""
    assert (parser.is_over, parser.keeps) == (True, keeps)
    parser.take(b"more")
    assert not parser.keeps


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"SSH-2.0-x\r\n\r\n", "is no begin of an answer"),
        (b"HTTP/2.0 200 OK\r\n\r\n", "is no begin of an answer"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "switched"),
        (OK + b"A b: c\r\n\r\n", "is no header"),
        (OK + b"A : c\r\n\r\n", "is no header"),
        (OK + b"A: c\r\n d\r\n\r\n", "is no header"),
        (OK + b"A\r\n\r\n", "is no header"),
        (OK + b"A: b\nC: d\r\n\r\n", "is no header"),
        (OK + b"A: b\x01\r\n\r\n", "is no header"),
        (OK + b"A: b\x7f\r\n\r\n", "is no header"),
        (OK + b"Content-Length: +1\r\n\r\n", "no length"),
        (OK + "Content-Length: ٣\r\n\r\n".encode(), "no length"),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "no length"),
        (OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "not understood"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "not understood"),
        (OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "not under"),
        (OK + b"A: " + b"b" * HEAD_BYTES_MAX, "the head of the answer is longer"),
        (CHUNKED + b"x\r\n", "no size"),
        (CHUNKED + b"-1\r\n", "no size"),
        (CHUNKED + b"1\n\r\n", "no size"),
        (CHUNKED + b"1" * 5000, "too long"),
        (CHUNKED + b"1\r\nab\r\n", "longer than it was said"),
        (CHUNKED + b"1\r\na\rb", "longer than it was said"),
        (CHUNKED + b"0\r\n" + b"A: b\r\n" * HEAD_BYTES_MAX, "behind the last chunk"),
    ],
    ids=str,
)
def test_what_leaves_a_doubt_is_no_answer(raw: bytes, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        AnswerParser().take(raw)


def test_a_request_has_the_head_that_it_is_given() -> None:
    head = request_head("/generate", "a:1", {"X-Request-Id": "7", "X-Raw": "\udcff"}, 3)
    assert head.split(b"\r\n") == [
        b"POST /generate HTTP/1.1",
        b"Host: a:1",
        b"Content-Length: 3",
        b"X-Request-Id: 7",
        b"X-Raw: \xff",
        b"",
        b"",
    ]


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b"])
def test_a_header_cannot_begin_another_line(bad: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head("/generate", "a:1", {"X-A": bad}, 0)
    with pytest.raises(ValueError, match="line break"):
        request_head("/generate", "a:1", {bad: "a"}, 0)


def test_a_head_is_read_as_it_is() -> None:
    parser = AnswerParser()
    parser.take(b"HTTP/1.1 429 Too Many Requests\r\nA: \r\na: \xff\r\n\r\n")
    assert parser.head == Head(429, [("A", ""), ("a", "\udcff")], None)
