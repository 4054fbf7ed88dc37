# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake store-events`: what the store has, as KV events."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from router_world import run, until
from store_host import pid_of, shared, store_directory
from store_makers import SIG, TIMEOUT_S, config, keys
from store_makers import until as soon
from store_meeting import owning
from store_objects import MIB, filled

from bootstrap_server.admission.secret import Keys as Secrets
from kvstore.client.pool import Version
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Put
from kvstore.store import Store
from sglang_mooncake.router import publishing, store_events
from sglang_mooncake.router.event_source import EventSource, streams_max
from sglang_mooncake.router.kv_events import EventStream
from sglang_mooncake.router.publishing import Publisher, follow
from sglang_mooncake.router.querying import Asked, HashQuery, matches
from sglang_mooncake.router.registered import Registered, Registration
from sglang_mooncake.router.store_events import StoreEvents
from sglang_mooncake.router.store_events_options import StoreEventsOptions
from sglang_mooncake.router.store_source import open_store

ALL = keys(12)
PAGE = 4
END = b"\xff" * 8


def names(some: Keys) -> list[int]:
    return [int.from_bytes(bytes(one[:8]), "big", signed=True) for one in some]


def has(stream: EventStream) -> set[int]:
    """Rows of ``ALL``."""
    return {row for row, name in enumerate(names(ALL)) if stream.first_of([name])}


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, len(ALL) - 1), max_size=20), max_size=8), st.data())
def test_batches_tell_what_comes_and_goes(steps: list[list[int]], data: st.DataObject) -> None:
    """Whatever is there at each look, in any order and as often as may be. Whoever comes late, or
    has missed some, asks for the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_events, "PAGES_MAX", 5)
        events, stream, late = StoreEvents(PAGE, 1000), EventStream(), EventStream()
        for rows in steps:
            new = events.batches(ALL[rows], 1.5)
            assert not events.batches(ALL[rows[::-1]], 2.5), "nothing has changed"
            for batch in data.draw(st.sampled_from([new, new[1:]])):
                stream.take(*batch, 0.0)
            stream.replayed(events.since(0 if stream.missing is None else stream.missing))
            assert has(stream) == set(rows)
        late.replayed(events.since(0))
        assert has(late) == has(stream)
        assert not stream.losses


def test_a_bounded_number_of_batches_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that takes half of them or more is not told anew."""
    monkeypatch.setattr(store_events, "PAGES_MAX", 2)
    events = StoreEvents(PAGE, 3)
    assert [number for number, _ in events.batches(ALL, 0.0)] == [0, 1, 2, 3, 4, 5, 6]
    assert [number for number, _ in events.since(0)] == [4, 5, 6]
    assert [number for number, _ in events.since(6)] == [6]
    assert events.since(7) == events.since(2**64 - 1) == []
    assert not events.tells_all


@given(st.lists(st.lists(st.integers(0, len(ALL) - 1), max_size=20), max_size=20))
def test_who_comes_late_learns_of_all_pages(steps: list[list[int]]) -> None:
    """Also of those that were stored before the batches that are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_events, "PAGES_MAX", 5)
        events = StoreEvents(PAGE, 7)
        for rows in steps:
            events.batches(ALL[rows], 1.5)
            late = EventStream()
            late.replayed(events.since(0))
            assert has(late) == set(rows)
            assert events.tells_all


def test_a_start_clears_what_was_known() -> None:
    """As SGLang's cache tells of its start."""
    stream, old = EventStream(), StoreEvents(PAGE, 10)
    (*_, stored) = old.batches(ALL, 0.0)
    stream.take(0, stored[1], 0.0)
    (cleared,) = StoreEvents(PAGE, 10).batches(ALL[:0], 0.0)
    stream.take(1, cleared[1], 0.0)
    assert (cleared[0], has(stream)) == (0, set())


# --- over sockets ---


ANYWHERE = StoreEventsOptions(
    store="{}",
    secret_file=None,
    page_size=PAGE,
    endpoint="tcp://127.0.0.1:0",
    replay_endpoint="tcp://127.0.0.1:0",
    topic="",
    batches=100,
)


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture
def lender(directory: Path) -> Iterator[Store]:
    """Of a server: the host's owner lends memory."""
    with Store(shared(directory)) as store:
        yield store


@pytest.fixture
def endpoints(directory: Path, lender: Store) -> Iterator[tuple[str, str]]:
    """Of one that follows the store in the directory."""
    assert lender.lenders
    is_ended = threading.Event()
    events = StoreEvents(PAGE, 100)
    with opened(directory) as own, Publisher(events, ANYWHERE) as publisher:
        thread = threading.Thread(target=follow, args=(own, events, publisher, is_ended))
        thread.start()
        yield publisher.endpoints
        is_ended.set()
        thread.join()


def opened(directory: Path) -> Store:
    return open_store(json.dumps({"directory": str(directory)}), Secrets())


def put(lender: Store, some: Keys) -> None:
    room = filled(lender, len(some), 1000)
    assert lender.put(some, SIG, room.pieces, TIMEOUT_S) == [Put.STORED] * len(some)


def test_pages_of_the_host_s_owner_are_listed(directory: Path, lender: Store) -> None:
    """While there is no owner, there are none."""
    with opened(directory) as own:
        put(lender, ALL)
        lender.remove(ALL[:3], SIG)
        soon(lambda: listed(own)[1] == sorted(names(ALL[3:])))
        assert own.keys(listed(own)[0]) is None
        os.kill(pid_of(lender), signal.SIGKILL)
        soon(lambda: not listed(own)[1])


def test_an_owner_lists_what_it_has(directory: Path) -> None:
    with owning(config(directory, 8 * MIB)) as owner:
        put(owner, ALL)
        soon(lambda: listed(owner)[1] == sorted(names(ALL)))


def listed(store: Store) -> tuple[Version, list[int]]:
    found = store.keys()
    assert found is not None
    return found[0], sorted(names(found[1]))


def test_another_router_knows_what_the_store_has(lender: Store, endpoints: tuple[str, str]) -> None:
    """It registers the publisher as a cache. What was told before it came is repeated."""
    registered = Registered()
    asked = Asked(HashQuery(seq_hashes=names(ALL)))

    def external() -> int:
        found = matches(registered.asked("default", None), asked, asyncio.get_running_loop().time())
        return sum(one.get("EXTERNAL", 0) for one in found.values())

    async def tried() -> None:
        endpoint, replay = endpoints
        put(lender, ALL[:8])
        await asyncio.to_thread(wait_for_batch, replay)
        async with aiohttp.ClientSession() as session:
            clock = asyncio.get_running_loop().time
            source = EventSource(
                session, tuple, lambda *_: (), registered, {}, streams_max(1024), clock
            )
            job = asyncio.create_task(source.run())
            one = Registration(instance_id="store", endpoint=endpoint, block_size=PAGE)
            one.replay_endpoint = replay
            registered.add(one)
            put(lender, ALL[8:])
            await until(lambda: external() == len(ALL) * PAGE)
            lender.remove(ALL[6:], SIG)
            await until(lambda: external() == 6 * PAGE)
            job.cancel()
            await asyncio.wait([job])

    run(tried())


def wait_for_batch(replay: str) -> None:
    """Until there is one behind that of the start."""
    soon(lambda: len(ask(replay, [b"", bytes(8)])) > 2)


def ask(replay: str, question: list[bytes]) -> list[list[bytes]]:
    """The answer to the end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.ipv6 = 0, True
        socket.connect(replay)
        socket.send_multipart(question)
        answer = []
        while not answer or answer[-1][-2] != END:
            assert socket.poll(TIMEOUT_S * 1e3), "no answer"
            answer.append(socket.recv_multipart())
        return answer


def test_a_question_of_another_form_is_left_unanswered(caplog: pytest.LogCaptureFixture) -> None:
    with with_batches(1) as (publisher, replay), asker(replay) as socket:
        for question in ([b"", b"a"], [bytes(8)], [b"", b"a", bytes(8)], [b"", b"\0" * 7 + b"\1"]):
            socket.send_multipart(question)
        socket.send_multipart([b"", bytes(8)])
        answers = [taken(publisher, socket) for _ in range(3)]
        assert [one[-2][-1] for one in answers] == [0xFF, 0, 0xFF]
        publisher.answer(0.0)
        assert not socket.poll(0)
    assert "a question for events is not of SGLang's form" in caplog.text


def test_too_many_pages_are_told_of_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, for as long as there are too many."""
    monkeypatch.setattr(store_events, "PAGES_MAX", 2)
    monkeypatch.setattr(publishing, "LOOK_S", 0.0)
    is_ended, looks = threading.Event(), [ALL[:2], ALL, ALL[:11], ALL[:2], ALL]

    def listed(since: int | None) -> tuple[int, Keys]:
        if len(looks) == 1:
            is_ended.set()
        return (since or 0) + 1, looks.pop(0)

    store: Any = SimpleNamespace(keys=listed, ask_lenders=lambda: ())
    few = msgspec.structs.replace(ANYWHERE, batches=4)
    with Publisher(events := StoreEvents(PAGE, 4), few) as publisher:
        follow(store, events, publisher, is_ended)
    assert caplog.text.count("12 pages are too many to be told anew") == 2
    assert "11 pages" not in caplog.text
    assert "5 batches at once, of which the last 4 are repeated" in caplog.text


def test_who_asks_twice_is_answered_twice() -> None:
    """Also where as much is repeated as is kept."""
    with with_batches(20) as (publisher, replay), asker(replay) as socket:
        for _ in range(3):
            socket.send_multipart([b"", bytes(8)])
            answer = [taken(publisher, socket) for _ in range(21)]
            assert [one[-2] for one in answer] == [
                *(n.to_bytes(8, "big") for n in range(1, 21)),
                END,
            ]


@contextmanager
def with_batches(batches: int) -> Iterator[tuple[Publisher, str]]:
    """One that keeps so many batches, and has them; and where it is asked for them."""
    events = StoreEvents(PAGE, batches)
    with Publisher(events, msgspec.structs.replace(ANYWHERE, batches=batches)) as publisher:
        for number in range(batches):
            publisher.publish(events.batches(ALL[: number % 2], 0.0))
        yield publisher, publisher.endpoints[1]


@contextmanager
def asker(replay: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(replay)
        yield socket


def taken(publisher: Publisher, socket: zmq.Socket[bytes]) -> list[bytes]:
    """What is said to an asker next."""
    soon(lambda: publisher.answer(0.001) or socket.poll(0))  # type: ignore[func-returns-value]
    return socket.recv_multipart()


# --- the command ---


def started(*words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "sglang_mooncake.sglang.cli", "store-events", "--page-size", "4"]
    return subprocess.Popen([*argv, *words], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_it_publishes_until_it_is_told_to_end(directory: Path) -> None:
    store = f'{{"directory": "{directory}"}}'
    here = ("--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint")
    with ExitStack() as stack:
        lender = stack.enter_context(Store(shared(directory)))
        one = stack.enter_context(started("--store", store, *here, "tcp://[::1]:0"))
        stack.callback(one.kill)
        assert one.stderr is not None
        said = ""
        while (found := re.search(r"published at (\S+), and repeated at (\S+)", said)) is None:
            said += one.stderr.readline()
            assert one.poll() is None, said
        put(lender, ALL)
        wait_for_batch(found[2])
        taken = stack.enter_context(started("--store", store, *here, found[2]))
        _, why = taken.communicate(timeout=TIMEOUT_S)
        assert (taken.returncode, f"cannot listen at {found[2]}" in why) == (1, True)
        bad = stack.enter_context(started("--store", "[]", *here, "tcp://127.0.0.1:0"))
        _, why = bad.communicate(timeout=TIMEOUT_S)
        assert (bad.returncode, "--store: '[]' is no JSON object" in why) == (2, True)
        one.send_signal(signal.SIGTERM)
        one.communicate(timeout=TIMEOUT_S)
        assert one.returncode == 0
