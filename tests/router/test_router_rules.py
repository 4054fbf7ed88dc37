# SPDX-License-Identifier: Apache-2.0
"""The router's rules: what requests carry, which servers are well, who is chosen, options."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.router.addresses import host_of, place_of
from sglang_mooncake.router.choice import Chooser
from sglang_mooncake.router.options import Options, OptionsError, add_arguments, options_of
from sglang_mooncake.router.passing import whole_lines
from sglang_mooncake.router.servers import Server, Servers
from sglang_mooncake.router.sglang_http import (
    Body,
    RequestError,
    Told,
    body_of,
    error_event,
    error_in,
    event_json,
    events_in,
    for_pair,
    is_single,
    told_in,
    wants_input_logprobs,
    wants_stream,
)

TEXT = st.text(max_size=5)
NUMBER = st.integers() | st.floats(allow_nan=False, allow_infinity=False)  # As JSON has them.
LEAF = st.none() | st.booleans() | NUMBER | TEXT
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(TEXT, LEAF, max_size=3)


def body(**members: object) -> Body:
    return body_of(json.dumps(members).encode())


@given(members=st.dictionaries(TEXT, JSON, max_size=4), room=st.integers(0, 2**62 - 1))
def test_a_pair_gets_all_that_the_client_has_said(members: dict[str, Any], room: int) -> None:
    sent = json.loads(for_pair(body_of(json.dumps(members).encode()), "[::1]", None, room))
    added = {"bootstrap_host": "[::1]", "bootstrap_port": None, "bootstrap_room": room}
    assert sent == {**members, **added}


def test_numbers_are_passed_on_as_they_were_written() -> None:
    raw = b'{"temperature":1e-07,"seed":123456789012345678901,"x":[1.10]}'
    assert for_pair(body_of(raw), "a", 1, 2).startswith(raw[:-1])


def test_a_number_that_no_server_takes_is_for_the_servers_to_refuse() -> None:
    assert is_single(body_of(b'{"n":%s}' % (b"1" * 5000)))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'{"a":}', b"{1:2}"])
def test_what_is_no_object_is_no_request(raw: bytes) -> None:
    with pytest.raises(RequestError):
        body_of(raw)


@pytest.mark.parametrize(
    ("members", "single"),
    [
        ({"text": "a"}, True),
        ({"text": "[a"}, True),
        ({"text": ["a"]}, False),
        ({"input_ids": [1]}, True),
        ({"input_ids": [[1], [2]]}, False),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"messages": [], "n": 1}, True),
        ({"messages": [], "n": 2}, False),
        ({"text": "a", "sampling_params": {"n": 1}}, True),
        ({"text": "a", "sampling_params": {"n": 3}}, False),
        ({"text": "a", "sampling_params": [{}]}, False),
        ({"text": "a", "rid": None}, True),
        ({"text": "a", "rid": "mine"}, False),
    ],
)
def test_only_a_single_request_without_a_name_gets_one(
    members: dict[str, Any], single: bool
) -> None:
    assert is_single(body(**members)) == single


def test_what_is_asked_for() -> None:
    assert wants_stream(body(stream=True))
    assert not wants_stream(body(stream=False))
    assert not wants_stream(body())
    assert wants_input_logprobs(body(return_logprob=[False, True]), "/generate")
    assert not wants_input_logprobs(body(return_logprob=False), "/generate")
    assert not wants_input_logprobs(body(return_logprob=True), "/v1/completions")


@pytest.mark.parametrize(
    ("url", "other", "same"),
    [
        ("http://a:1", "http://A:1/", True),
        ("http://a.b", "http://a.b.:80", True),
        ("http://localhost:1", "http://127.0.0.1:1", True),
        ("http://[::1]:1", "http://localhost:1", True),
        ("http://[FD00:0::1]:1", "http://[fd00::1]:1", True),
        ("http://[::ffff:10.0.0.1]:1", "http://10.0.0.1:1", True),
        ("http://a:1", "http://a:2", False),
        ("http://a:1", "http://a:1/b", False),
        ("http://127.0.0.1:1", "http://127.0.0.2:1", False),
        ("https://a", "http://a", False),
    ],
)
def test_a_server_is_the_same_however_its_url_is_spelled(url: str, other: str, same: bool) -> None:
    assert (place_of(url) == place_of(other)) == same


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://10.0.0.1:30000", "10.0.0.1"), ("http://[fd00::1]:30000", "[fd00::1]")],
)
def test_a_host_is_named_as_urls_name_it(url: str, host: str) -> None:
    assert host_of(url) == host


@given(events=st.lists(st.binary().filter(lambda one: b"\n" not in one)), cut=st.integers(0, 50))
def test_events_are_whole_whatever_packets_they_come_in(events: list[bytes], cut: int) -> None:
    whole = [one + b"\n\n" for one in events]
    raw = b"".join(whole)
    buffer, found = bytearray(), []
    for part in (raw[:cut], raw[cut:]):
        buffer += part
        found += events_in(buffer)
    assert found == whole
    assert not buffer


def test_an_errors_event_is_read_as_one() -> None:
    told = event_json(error_event(502, "gone"))
    assert told is not None
    assert error_in(told) == (502, "gone")
    assert event_json(b"data: [DONE]\n\n") is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"error": "word"}, (500, "word")),
        ({"error": {"message": "m", "code": 400}}, (400, "m")),
        ({"error": {"message": "m", "code": "rate_limit"}}, (500, "m")),
        (
            {"meta_info": {"finish_reason": {"type": "abort", "message": "m", "status_code": 503}}},
            (503, "m"),
        ),
        ({"meta_info": {"finish_reason": {"type": "stop"}}}, None),
        ({"text": 'an "error" of "abort"'}, None),
        ("error", None),
    ],
)
def test_answers_that_say_that_they_are_errors(
    answer: object, error: tuple[int, str] | None
) -> None:
    assert error_in(json.dumps(answer).encode()) == error


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"meta_info": {"prompt_tokens": 5, "cached_tokens": 2}}, Told(5, 2)),
        ([{"meta_info": {"prompt_tokens": 5, "cached_tokens": 2}}] * 2, Told(10, 4, 2)),
        ({"usage": {"prompt_tokens": 5}}, Told(5, None)),
        (
            {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}},
            Told(5, 1),
        ),
        ({"usage": {"prompt_tokens": "many"}}, Told()),
        (7, Told()),
    ],
)
def test_what_a_prefill_server_tells_of_the_prompt(answer: object, told: Told) -> None:
    assert told_in(json.dumps(answer).encode()) == told


@given(parts=st.lists(st.text("a\n", max_size=4).map(str.encode), max_size=8))
def test_a_stream_is_passed_on_by_whole_lines(parts: list[bytes]) -> None:
    async def come() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def passed_on() -> list[bytes]:
        return [part async for part in whole_lines(come())]

    passed = asyncio.run(passed_on())
    assert b"".join(passed) == b"".join(parts)
    assert all(part.endswith(b"\n") for part in passed[:-1])


# --- servers ---


def test_a_server_is_ill_after_so_many_failures_in_a_row() -> None:
    server = Server("decode", "http://a:1")
    assert not server.failed("no", 1.0, 2)
    assert not server.answered()
    assert not server.failed("no", 2.0, 2)
    assert server.is_well
    assert server.failed("gone", 3.0, 2)
    assert not server.failed("still", 4.0, 2), "it is told once"
    assert (server.is_well, server.why_ill, server.ill_for_s(5.0)) == (False, "still", 2.0)
    assert server.answered()
    assert (server.is_well, server.why_ill, server.ill_for_s(6.0)) == (True, "", 0.0)
    assert server.counts.ills == 1


def test_an_answer_to_what_was_asked_before_makes_no_server_well() -> None:
    server = Server("decode", "http://a:1")
    server.failed("no", 1.0, 2)
    server.served()
    server.failed("no", 2.0, 2)
    assert server.is_well, "not one after another"
    server.failed("gone", 3.0, 1)
    server.served()
    assert not server.is_well


def test_one_that_failed_is_asked_at_once_and_one_that_is_ill_often() -> None:
    server = Server("decode", "http://a:1")
    assert server.is_to_be_probed(0.0, 10.0)
    assert not server.is_to_be_probed(9.0, 10.0)
    assert server.is_to_be_probed(10.0, 10.0)
    server.failed("hung up", 10.5, 2)
    assert server.is_to_be_probed(10.5, 10.0), "it may be gone"
    server.failed("gone", 10.6, 2)
    assert not server.is_to_be_probed(11.0, 10.0)
    assert server.is_to_be_probed(11.5, 10.0)


def test_a_server_that_has_just_failed_is_used_where_there_is_no_other() -> None:
    first, second = Server("decode", "http://a:1"), Server("decode", "http://b:1")
    servers = Servers([first, second])
    assert servers.usable("decode", [first]) == [second]
    second.failed("gone", 0.0, 1)
    assert servers.usable("decode", [first]) == [first]
    first.failed("gone", 0.0, 1)
    assert servers.usable("decode") == servers.usable("prefill") == []
    assert servers.nobody("decode") == (
        "no decode server is well: http://a:1: gone; http://b:1: gone"
    )


# --- choice ---


def test_turns_are_taken() -> None:
    servers = [Server("decode", f"http://{name}:1") for name in "abc"]
    chooser = Chooser("round_robin", Random(1))
    assert [chooser.choose(servers) for _ in range(6)] == servers * 2


@pytest.mark.parametrize("policy", ["random", "power_of_two"])
def test_chance_is_fair(policy: str) -> None:
    servers = [Server("decode", f"http://{name}:1") for name in "abc"]
    chooser = Chooser(policy, Random(1))
    counts = Counter(chooser.choose(servers) for _ in range(3000))
    assert all(900 < counts[server] < 1100 for server in servers)
    assert chooser.choose(servers[:1]) is servers[0]


def test_of_two_the_one_with_less_to_do_is_chosen() -> None:
    servers = [Server("decode", f"http://{name}:1") for name in "abc"]
    servers[1].under_way = 1
    chooser = Chooser("power_of_two", Random(1))
    counts = Counter(chooser.choose(servers) for _ in range(300))
    assert counts[servers[1]] == 0


# --- options ---


def parsed(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(words))


PAIR = ("--prefill", "http://a:1", "8998", "--decode", "http://b:2")


def test_a_command_line_of_mini_lb_is_taken() -> None:
    found = parsed("--pd-disaggregation", "--mini-lb", "--host", "::1", "--port", "8000", *PAIR)
    assert found.prefill == (("http://a:1", 8998),)
    assert found.decode == ("http://b:2",)
    assert (found.host, found.port) == ("::1", 8000)
    assert found.without_effect == ()
    assert found.max_requests is None


def test_options_of_sglangs_router_that_change_nothing_are_named() -> None:
    found = parsed(*PAIR, "--cache-threshold", "0.5", "--worker-startup-timeout-secs", "60")
    assert found.without_effect == ("--cache-threshold", "--worker-startup-timeout-secs")


def test_policies_are_of_all_or_of_one_role() -> None:
    found = parsed(*PAIR, "--policy", "random", "--decode-policy", "round_robin")
    assert (found.prefill_policy, found.decode_policy) == ("random", "round_robin")


def test_a_registry_that_is_named_twice_is_asked_once() -> None:
    words = ("--registry", "b:2", "--registry", "localhost:1", "--registry", "127.0.0.1:1")
    assert parsed(*words).registries == ("b:2", "localhost:1")


def test_a_port_of_a_registry_may_be_left_to_the_server() -> None:
    for words in (("http://a:1",), ("http://a:1/", "none")):
        assert parsed("--prefill", *words, "--decode", "http://b:2").prefill == (
            ("http://a:1", None),
        )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (PAIR[:3], "--decode is missing"),
        (PAIR[3:], "--prefill is missing"),
        ((*PAIR, "--decode", "b:2"), "is no URL"),
        ((*PAIR, "--decode", "http://b:x"), "is no URL"),
        ((*PAIR, "--decode", "http://a:1"), "http://a:1 is named twice"),
        ((*PAIR, "--decode", "http://A.:1"), "http://a:1, also as http://A.:1, is named twice"),
        ((*PAIR, "--decode", "http://c:1?d"), "is no URL"),
        ((*PAIR, "--decode", "http://user:word@c:1"), "is no URL"),
        ((*PAIR, "--policy", "random", "--max-ttft-secs", "1"), "only the policy cache_aware"),
        (
            (*PAIR, "--prefill", "http://c:1", "word"),
            "'word' is not a whole number from 1 to 65535, nor the word none",
        ),
        ((*PAIR, "--prefill", "http://c:1", "1", "2"), "takes a URL and a port"),
    ],
)
def test_servers_that_cannot_be_meant_are_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        parsed(*words)
