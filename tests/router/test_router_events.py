# SPDX-License-Identifier: Apache-2.0
"""KV events: which pages a cache has, gaps, repetition, new processes, silence."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, answers, run, token_names, until

from sglang_mooncake.router import event_source, kv_events, pages, placement, querying
from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.event_source import EventSource, StreamsMax, streams_max
from sglang_mooncake.router.kv_events import NEVER, SILENCE_S, EventStream, Room
from sglang_mooncake.router.looking import Looker
from sglang_mooncake.router.pages import LONG_NAMES, names_of, seed_of
from sglang_mooncake.router.placement import Look, PrefillView
from sglang_mooncake.router.querying import Asked, HashQuery, TokenQuery, matches
from sglang_mooncake.router.registered import Registered, Registration, Unregistration
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.serving import allow_open_files
from sglang_mooncake.router.sglang_http import GENERATE, Told, body_of

Event = dict[str, Any]


def stored(*names: int, **more: Any) -> Event:
    event = {"type": "BlockStored", "block_hashes": list(names), "parent_block_hash": None}
    return {**event, "token_ids": [1] * len(names), "block_size": 1, "lora_id": None, **more}


def removed(*names: int, **more: Any) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(names), **more}


CLEARED: Event = {"type": "AllBlocksCleared"}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def has(stream: EventStream, *names: int) -> list[bool]:
    return [stream.first_of([name]) == 1 for name in names]


def test_pages_are_those_that_were_stored_and_not_removed() -> None:
    stream = EventStream()
    assert stream.state(0.0) == "waiting"
    stream.take(0, batch(stored(1, -2, 3), removed(3)), 1.0)
    assert has(stream, 1, -2, 3) == [True, True, False]
    assert stream.first_of([1, -2, 3]) == 2
    assert (stream.state(1.0), stream.age_s(3.0)) == ("live", 2.0)
    stream.take(1, batch(CLEARED, stored(5)), 2.0)
    assert has(stream, 1, 5) == [False, True]


def test_a_page_is_there_until_no_medium_has_it() -> None:
    stream = EventStream()
    on_host = {"medium": "CPU_PINNED"}
    stream.take(0, batch(stored(1, medium="GPU"), stored(1, **on_host), removed(1)), 0.0)
    assert has(stream, 1) == [True]
    stream.take(1, batch(removed(1, **on_host), removed(7)), 0.0)
    assert has(stream, 1) == [False]


def test_a_page_that_is_told_of_stands_for_those_before_it_but_in_a_store() -> None:
    """A server's cache drops no page that others follow: what was missed there has been told."""
    stream = EventStream()
    stream.take(0, batch(stored(3, 4)), 0.0)
    assert stream.first_of([1, 2, 3, 4, 5]) == 4
    assert stream.by_medium([1, 2, 3, 4, 5]) == {"GPU": 4}
    stream.take(1, batch(stored(1, medium="EXTERNAL")), 0.0)
    assert stream.first_of([1, 2, 3, 4, 5]) == 1
    assert stream.by_medium([1, 2, 3, 4, 5]) == {"GPU": 0, "EXTERNAL": 1}


def test_events_of_older_releases_are_arrays() -> None:
    stream = EventStream()
    old = ["BlockStored", [1, 2], None, [7, 8], 1, None, "GPU"]
    salted = ["BlockStored", [3], 2, [9], 1, None, "GPU", {"cache_salt": "a"}]
    stream.take(0, batch(old, salted, ["BlockRemoved", [2], "GPU"]), 0.0)
    assert has(stream, 1, 2, 3) == [True, False, True]
    stream.take(1, batch(["AllBlocksCleared"]), 0.0)
    assert len(stream) == 0


def test_what_cannot_be_read_leaves_nothing_known() -> None:
    stream = EventStream()
    stream.take(0, batch(stored(1)), 0.0)
    stream.take(1, b"\xc1", 0.0)
    assert (len(stream), stream.losses) == (0, 1)
    stream.take(2, batch(stored(2)), 0.0)
    assert has(stream, 2) == [True]
    stream.take(3, batch(stored(3, medium="GPU")).replace(b"GPU", b"G\xffU"), 0.0)
    assert (len(stream), stream.losses) == (0, 2)


@given(
    gone=st.sets(st.integers(0, 9)),
    kept_from=st.integers(0, 10),
    events=st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=3), min_size=10, max_size=10
    ),
)
def test_missed_batches_are_made_up_for_or_leave_nothing_wrong(
    gone: set[int], kept_from: int, events: list[list[tuple[bool, int]]]
) -> None:
    """The server repeats its last batches alone. Whatever counts as known is there."""
    batches = [
        batch(*(stored(name) if is_stored else removed(name) for is_stored, name in one))
        for one in events
    ]
    truth: set[int] = set()
    stream = EventStream()
    for number, payload in enumerate(batches):
        for is_stored, name in events[number]:
            (truth.add if is_stored else truth.discard)(name)
        if number in gone:
            continue
        stream.take(number, payload, 0.0)
        if (missing := stream.missing) is not None:
            first = max(missing, kept_from)
            stream.replayed([(n, batches[n]) for n in range(first, number + 1)])
        assert stream.missing is None
        known = {name for name in range(6) if stream.first_of([name])}
        assert known <= truth
        if not stream.losses:
            assert known == truth


def test_as_many_batches_as_there_are_may_be_missing() -> None:
    """A server that repeats more than its socket holds leaves some out, here and there."""
    stream = EventStream()
    stream.take(8002, batch(stored(1)), 0.0)
    stream.replayed([(number, batch(stored(2))) for number in range(0, 8000, 2)])
    assert (stream.missing, stream.losses) == (None, 4000)
    assert has(stream, 1, 2) == [True, False]


def test_what_was_repeated_already_is_not_a_new_process() -> None:
    stream = EventStream()
    stream.replayed([(n, batch(stored(n))) for n in range(3)])
    stream.take(1, batch(stored(1)), 0.0)
    stream.take(2, batch(stored(2)), 0.0)
    stream.take(3, batch(stored(3)), 0.0)
    assert has(stream, 0, 1, 2, 3) == [True] * 4
    stream.take(0, batch(stored(9)), 0.0)
    assert has(stream, 0, 9) == [False, True], "a new process counts from 0"


def test_a_new_process_whose_first_batches_were_missed_is_caught_up_with() -> None:
    stream = EventStream()
    for number in range(5):
        stream.take(number, batch(stored(number)), 0.0)
    stream.take(2, batch(stored(22)), 0.0)
    assert stream.missing == 0
    stream.replayed([(n, batch(stored(20 + n))) for n in range(3)])
    assert has(stream, 4, 20, 21, 22) == [False, True, True, True]


# --- silence ---


def test_a_stream_is_silent_when_what_was_computed_is_not_told() -> None:
    stream = EventStream()
    stream.take(0, batch(stored(1)), 10.0)
    stream.expect(9.0, 11.0)
    assert stream.state(100.0) == "live", "an event has come since"
    stream.expect(12.0, 13.0)
    assert stream.state(13.0 + SILENCE_S / 2) == "live"
    assert stream.state(13.0 + SILENCE_S) == "silent"
    stream.take(1, batch(stored(2)), 20.0)
    assert stream.state(20.0) == "live"


PAGE = 4


def look(tokens: Sequence[int]) -> Look:
    return Look(token_names(tokens, 2), 2, len(tokens), prompt=tokens)


@pytest.mark.parametrize(
    ("told", "cached_max", "state"),
    [
        (Told(17, 0), None, "silent"),
        (Told(17, 12), None, "silent"),
        # A prompt that the cache had. Its last token is computed in any case.
        (Told(16, 12), None, "live"),
        (Told(17, 16), None, "live"),
        # The client asked for log-probabilities: they are computed, though the cache has the pages.
        (Told(17, 0), 0, "live"),
        # Batches: prompts shorter than a page, and longer ones of which something is new.
        (Told(12, 0, 4), None, "live"),
        (Told(20, 0, 2), None, "silent"),
    ],
)
def test_an_event_is_due_where_a_page_is_new_for_certain(
    told: Told, cached_max: int | None, state: str
) -> None:
    view, stream = PrefillView(Server("prefill", "http://a:1")), EventStream()
    stream.take(0, batch(stored(1)), 1.0)
    view.follow(stream, PAGE)
    prompt = Look((), PAGE, 17, cached_max=cached_max)
    view.ended(view.send(prompt, view.figures(prompt, 2.0), 2.0), 3.0, told)
    assert stream.state(3.0 + SILENCE_S) == state


def test_an_event_of_another_prompt_does_not_hide_that_none_has_come() -> None:
    view, stream = PrefillView(Server("prefill", "http://a:1")), EventStream()
    view.follow(stream, PAGE)
    stream.take(0, batch(stored(1)), 0.0)
    batches = iter(range(1, 10))

    def computed(begin: int, at_s: float, *told: Event, cached: int = 0) -> str:
        """From then on; 1 s later there is an event, and after one more the answer."""
        prompt = look(range(begin, begin + 17))
        placed = view.send(prompt, view.figures(prompt, at_s), at_s)
        stream.take(next(batches), batch(*told), at_s + 1)
        view.ended(placed, at_s + 2, Told(17, cached))
        return stream.state(at_s + 2 + SILENCE_S)

    other = stored(2)
    assert computed(0, 10.0, other) == "live", "its pages may have other names in events"
    assert computed(0, 20.0, stored(*token_names(range(17), PAGE)[:1])) == "live"
    assert computed(0, 30.0, other, cached=PAGE) == "silent", "its second page was not told"
    assert computed(100, 40.0, stored(*token_names(range(100, 117), PAGE))) == "live"
    assert computed(200, 50.0, other) == "silent"
    stream.take(next(batches), batch(other), 60.0)
    assert stream.state(60.0) == "live"


def test_a_servers_events_are_believed_while_they_come() -> None:
    view, stream = PrefillView(Server("prefill", "http://a:1")), EventStream()
    prompt = look(range(16))
    placed = view.send(prompt, view.figures(prompt, 0.0), 0.0)
    view.follow(stream, PAGE)
    names = token_names(range(16), PAGE)
    stream.take(0, batch(stored(*names[:2])), 1.0)
    assert view.figures(prompt, 1.0).hit_tokens == 15, "it is about to be there"
    view.ended(placed, 1.5, Told(16, 0))
    assert view.figures(prompt, 1.5).hit_tokens == 8
    # Computed once more, and nothing is told of it.
    placed = view.send(prompt, view.figures(prompt, 2.0), 2.0)
    view.ended(placed, 3.0, Told(16, 0))
    assert stream.state(3.0 + SILENCE_S) == "silent"
    assert view.figures(prompt, 3.0 + SILENCE_S).hit_tokens == 15, "what it was sent"


def test_events_say_nothing_of_prompts_that_they_do_not_name() -> None:
    view, stream = PrefillView(Server("prefill", "http://a:1")), EventStream()
    stream.take(0, batch(stored(1)), 0.0)
    view.follow(stream, PAGE)
    text = Look([1, 2], 10.0, 20.0, text_bytes=80)
    view.ended(view.send(text, view.figures(text, 0.0), 0.0), 1.0, None)
    assert view.figures(text, 1.0).hit_tokens == 19


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_events_reach_as_far_into_a_prompt_as_what_the_router_remembers(page: int) -> None:
    """SGLang's pages have one token each by default."""
    prompt = list(range(140_000))
    telling, quiet = (PrefillView(Server("prefill", f"http://{name}:1")) for name in "ab")
    stream = EventStream()
    stream.take(0, batch(stored(*token_names(prompt, page))), 0.0)
    telling.follow(stream, page)
    asked = Looker().look(body_of(json.dumps({"input_ids": prompt}).encode()), GENERATE)
    quiet.ended(quiet.send(asked, quiet.figures(asked, 0.0), 0.0), 1.0, None)
    known = quiet.figures(asked, 2.0).hit_tokens
    assert known > 100_000
    assert telling.figures(asked, 2.0).hit_tokens >= known


def test_of_more_pages_than_are_kept_the_first_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the server was sent counts, too."""
    monkeypatch.setattr(kv_events, "PAGES_MAX", 6)
    view, stream = PrefillView(Server("prefill", "http://a:1")), EventStream()
    view.follow(stream, PAGE)
    prompt, other = look(range(16)), look([7, *range(31)])
    names, others = token_names(range(16), PAGE), token_names([7, *range(31)], PAGE)
    stream.take(0, batch(stored(*names), *map(stored, others)), 0.0)
    assert (len(stream), stream.left_out) == (6, 6)
    assert view.figures(prompt, 0.0).hit_tokens == 15
    assert view.figures(other, 0.0).hit_tokens == 2 * PAGE
    view.ended(view.send(other, view.figures(other, 0.0), 0.0), 1.0, None)
    assert view.figures(other, 1.0).hit_tokens == 31
    stream.take(1, batch(removed(*others[:2]), stored(names[0], medium="CPU_PINNED")), 2.0)
    assert (len(stream), stream.left_out) == (4, 6), "a page that is there takes no room"
    stream.take(2, batch(CLEARED, stored(*names[:2])), 3.0)
    assert view.figures(other, 3.0).hit_tokens == 0, "all that it tells of is known again"


def test_streams_that_share_room_give_it_back() -> None:
    room = Room(3)
    one, other = EventStream(room), EventStream(room)
    one.take(0, batch(stored(1, 2)), 0.0)
    other.take(0, batch(stored(1, 2)), 0.0)
    assert (len(one), len(other), other.left_out, room.pages) == (2, 1, 1, 0)
    one.take(1, batch(stored(1, medium="DISK"), removed(1), removed(2), removed(7)), 1.0)
    assert (len(one), room.pages) == (1, 1), "a page that the disk has is still known"
    other.take(1, batch(stored(2, 3)), 1.0)
    assert (other.left_out, room.pages) == (2, 0)
    other.take(0, batch(stored(9)), 2.0)
    assert (len(other), room.pages) == (1, 1), "a new process begins with nothing"
    for _ in range(2):
        one.close()
        other.close()
    assert room.pages == 3


def test_events_that_name_nothing_of_what_a_cache_has_are_not_believed() -> None:
    view, stream = PrefillView(Server("prefill", "http://a:1")), EventStream()
    stream.take(0, batch(stored(1)), 0.0)
    view.follow(stream, PAGE)
    prompt = look(range(17))

    def answer(told: Told, times: int = NEVER) -> str:
        for _ in range(times):
            view.ended(view.send(prompt, view.figures(prompt, 0.0), 0.0), 1.0, told)
        return stream.state(1.0)

    assert answer(Told(17, PAGE - 1)) == "live", "less than a page"
    assert answer(Told(17, 16, 2)) == "live", "another one of the batch may have had it"
    assert answer(Told(17, 16), NEVER - 1) == "live"
    assert view.figures(prompt, 1.0).hit_tokens == 0
    assert answer(Told(17, 16), 1) == "never hits"
    assert view.figures(prompt, 1.0).hit_tokens == 16, "what it was sent"
    stream.take(1, batch(stored(*token_names(range(17), PAGE)[:1])), 2.0)
    assert answer(Told(17, 16), 1) == "live"
    assert view.figures(prompt, 3.0).hit_tokens == PAGE


def test_what_was_loaded_from_a_store_says_nothing_of_events() -> None:
    class Pool:
        def first_of(self, digests: Sequence[bytes]) -> int:
            return len(digests)

        def told(self, expected: float, found: float) -> None:
            pass

    view, stream = PrefillView(Server("prefill", "http://a:1"), Pool()), EventStream()
    view.page_size = PAGE
    stream.take(0, batch(stored(1)), 0.0)
    view.follow(stream, PAGE)
    prompt = look(range(17))
    for _ in range(NEVER):
        view.ended(view.send(prompt, view.figures(prompt, 0.0), 0.0), 1.0, Told(17, 16))
    assert stream.state(1.0) == "live"


# --- for other routers ---


def telling(page: int, *events: Event, name: str = "http://a:1") -> dict[str, dict[int, CacheView]]:
    view, stream = CacheView(name), EventStream()
    stream.take(0, batch(*events), 0.0)
    view.follow(stream, page)
    return {name: {0: view}}


NAMES = token_names(range(16), PAGE)
SALTED = token_names(range(16), PAGE, seed_of("s"))
TOLD = {
    **telling(
        PAGE,
        stored(*NAMES[:3], medium="GPU"),
        stored(*NAMES[1:], medium="CPU_PINNED"),
        stored(NAMES[0], medium="EXTERNAL"),
        stored(SALTED[0], medium="DISK"),
    ),
    **telling(8, CLEARED, name="http://b:1"),
    "http://c:1": {0: CacheView("http://c:1")},
}
NOTHING = {"longest_matched": 0, "DP": {"0": 0}, "GPU": 0, "CPU": 0, "DISK": 0}
AT_A = {"longest_matched": 16, "DP": {"0": 16}, "GPU": 12, "CPU": 0, "DISK": 0, "EXTERNAL": 4}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, {"http://a:1": AT_A, "http://b:1": NOTHING}),
        ({"block_size": 8}, {"http://b:1": NOTHING}),
        ({"instance_id": "http://a:1"}, {"http://a:1": AT_A}),
        (
            {"block_size": PAGE, "cache_salt": "s"},
            {
                "http://a:1": {
                    **NOTHING,
                    "longest_matched": 4,
                    "DP": {"0": 4},
                    "DISK": 4,
                    "EXTERNAL": 0,
                }
            },
        ),
        ({"block_size": PAGE, "lora_name": "x"}, {"http://a:1": {**NOTHING, "EXTERNAL": 0}}),
    ],
)
def test_other_routers_are_told_which_caches_have_a_prompt(
    query: dict[str, Any], found: dict[str, Any]
) -> None:
    asked = msgspec.convert({"model": "m", "token_ids": list(range(17)), **query}, TokenQuery)
    assert matches(TOLD, Asked(asked), 0.0) == found


def test_a_store_is_a_medium_of_all_that_load_from_it() -> None:
    looked = list[int]()

    class Pool:
        def first_of(self, digests: Sequence[bytes]) -> int:
            looked.append(len(digests))
            return 3 if names_of(digests) == NAMES else 0

        def told(self, expected: float, found: float) -> None:
            raise AssertionError

    def external(**more: Any) -> list[int]:
        asked = msgspec.convert({"token_ids": list(range(17)), **more}, TokenQuery)
        found = matches(TOLD, Asked(asked), 0.0, Pool())
        return [one.get("EXTERNAL", -1) for one in found.values()]

    assert external() == [12, 0], "pages of another size are others"
    assert external(lora_name="x") == [0, -1]
    asked = Asked(msgspec.convert({"token_ids": list(range(17))}, TokenQuery))
    assert matches(TOLD, asked, 0.0, Pool())["http://b:1"]["longest_matched"] == 0
    looked.clear()
    many = {**TOLD, **telling(PAGE, CLEARED, name="http://d:1")}
    found = matches(many, asked, 0.0, Pool())
    assert found["http://a:1"]["EXTERNAL"] == found["http://d:1"]["EXTERNAL"] == 12
    assert looked == [4, 2], "once for each size of pages"


@pytest.mark.parametrize("name", ["seq_hashes", "block_hash"])
def test_other_routers_may_name_pages_as_events_do(name: str) -> None:
    asked = msgspec.convert({"instance_id": "http://a:1", name: NAMES}, HashQuery)
    assert matches(TOLD, Asked(asked), 0.0) == {"http://a:1": AT_A}


# --- over sockets ---


def bound(one: zmq.asyncio.Socket, host: str, port: int) -> int:
    one.setsockopt(zmq.IPV6, 1)
    if port == 0:
        return one.bind_to_random_port(f"tcp://{host}")
    one.bind(f"tcp://{host}:{port}")
    return port


class Publisher:
    """As SGLang's: publishes, and repeats what it is asked for."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        port: int = 0,
        replay_port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        """0: any port."""
        self._out, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._batches: list[bytes] = []
        self.asked: list[int] = []
        try:
            self.port = bound(self._out, host, port)
            self.replay_port = bound(self._replay, host, replay_port)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self._out.close(linger=0)
        self._replay.close(linger=0)

    async def publish(self, *events: Event, is_lost: bool = False) -> None:
        number = len(self._batches)
        self._batches.append(batch(*events))
        if not is_lost:
            await self._out.send_multipart([b"", number.to_bytes(8, "big"), self._batches[-1]])

    async def repeat(self) -> None:
        while True:
            who, _, first = await self._replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, payload in enumerate(self._batches):
                if number >= self.asked[-1]:
                    frames = [who, b"", b"", number.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart(frames)
            await self._replay.send_multipart([who, b"", b"", b"\xff" * 8, b""])

    def described(self, **more: Any) -> dict[str, Any]:
        told = {"endpoint_port_base": self.port, "block_size": PAGE, "dp_size": 1, "topic": ""}
        return {"kv_events": {**told, "replay_endpoint_port_base": self.replay_port, **more}}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_events_are_followed_and_missed_ones_asked_for(host: str) -> None:
    names = token_names(range(400), PAGE)

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context, host=f"[{host}]" if ":" in host else host)
        repeating = asyncio.create_task(publisher.repeat())
        await publisher.publish(stored(*names[:50]))
        try:
            world = World(prefill=2, host=host, prefill_policy="cache_aware")
            world.prefill[1].info = publisher.described()
            async with world:
                told = answers({"meta_info": {"prompt_tokens": 400, "cached_tokens": 0}})
                for server in world.prefill:
                    server.answer = told
                stream = await followed(world, 1)
                await until(lambda: len(stream) == 50)
                assert publisher.asked == [0], "what was published before"
                await heard(publisher, stream)
                # Batches that came before the subscription were missed as well.
                await until(lambda: stream.missing is None)
                gaps, asked = stream.gaps, len(publisher.asked)
                await publisher.publish(stored(*names[50:]), is_lost=True)
                await publisher.publish(stored(1))
                await until(lambda: stream.first_of(names) == 100)
                assert (stream.gaps, len(publisher.asked)) == (gaps + 1, asked + 1)
                _, found = await world.ask("/query", token_ids=list(range(400)), block_size=PAGE)
                assert found["default"][world.prefill[1].url]["longest_matched"] == 400
                assert (await world.ask("/query", token_ids="x"))[0] == 400
                raw = b'{"token_ids":[],"model":"\xff"}'
                async with world.client.post(f"{world.url}/query", data=raw) as response:
                    assert response.status == 400
                await world.ask(input_ids=list(range(400)))
                assert len(world.prefill[1].asked) == 1
                _, text = await world.get("/metrics")
                url = world.prefill[1].url
                name = f'sglang_mooncake_router_event_gaps_total{{role="prefill",server="{url}"}}'
                assert f"{name} {gaps + 1}" in text.splitlines()
        finally:
            repeating.cancel()
            await asyncio.gather(repeating, return_exceptions=True)
            context.destroy(linger=0)

    run(job())


def test_a_stream_that_is_cut_is_noticed_and_what_was_missed_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 s are allowed from the end of the prompt of which nothing is told."""
    assert SILENCE_S + 2 * event_source.TICK_S <= 5.0
    monkeypatch.setattr(kv_events, "SILENCE_S", 0.1)
    caplog.set_level("INFO")
    prompt = list(range(400))

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        try:
            world = World(prefill=1, prefill_policy="cache_aware")
            described = publisher.described(replay_endpoint_port_base=None)
            world.prefill[0].info = described
            async with world:
                told = {"meta_info": {"prompt_tokens": 400, "cached_tokens": 0}}
                world.prefill[0].answer = answers(told)
                stream = await followed(world, 0)
                await heard(publisher, stream)
                await world.ask(input_ids=prompt)
                await until(lambda: "have gone silent" in caplog.text)
                assert await seen(world) == ("silent", 0)
                # What it was sent counts now, and that is not there.
                await world.ask(input_ids=prompt)
                await world.idle()
                assert await seen(world) == ("silent", 1)
                _, text = await world.get("/metrics")
                of = f'{{role="prefill",server="{world.prefill[0].url}"}}'
                assert f"sglang_mooncake_router_prefixes_missed_total{of} 1" in text
                assert 'sglang_mooncake_router_event_streams{state="silent"} 1' in text
                await publisher.publish(stored(*token_names(prompt, PAGE)))
                await until(lambda: "are back" in caplog.text)
                assert await seen(world) == ("live", 1)
        finally:
            context.destroy(linger=0)

    run(job())


def test_of_what_is_repeated_there_is_an_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who repeats more counts as one who repeats nothing, and is followed from then on."""
    monkeypatch.setattr(event_source, "REPLAY_BYTES_MAX", 1000)

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        repeating = asyncio.create_task(publisher.repeat())
        try:
            for name in range(100):
                await publisher.publish(stored(name), is_lost=True)
            world = World(prefill=1, prefill_policy="cache_aware")
            world.prefill[0].info = publisher.described()
            async with world:
                stream = await followed(world, 0)
                await until(lambda: "repeats more than is read" in caplog.text)
                assert len(stream) == 0
                await heard(publisher, stream)
                await until(lambda: len(stream) == 1)
        finally:
            repeating.cancel()
            context.destroy(linger=0)

    run(job())


def test_a_decode_servers_cache_is_followed_where_it_has_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "SILENCE_S", 0.1)
    caplog.set_level("INFO")
    prompt = list(range(400))

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        repeating = asyncio.create_task(publisher.repeat())
        await publisher.publish(stored(*token_names(prompt, PAGE)))
        keeps = {"disaggregation_decode_enable_radix_cache": True}
        try:
            world = World(decode=3, prefill_policy="cache_aware", decode_policy="cache_aware")
            world.decode[0].info = publisher.described()  # Its cache is off.
            world.decode[1].info = publisher.described() | keeps
            world.decode[2].info = publisher.described(dp_size=2) | keeps
            async with world:
                while await decode_streams(world) != [None, "live", None]:
                    await asyncio.sleep(0.005)
                assert f"{world.decode[2].url} has 2 DP ranks" in caplog.text
                for _ in range(3):
                    await world.ask(input_ids=prompt)
                assert [len(one.asked) for one in world.decode] == [0, 3, 0]
                _, text = await world.get("/metrics")
                assert 'sglang_mooncake_router_decode_choices_total{reason="cache"} 3' in text
                assert await decode_streams(world) == [None, "live", None], "nothing was new"
                # It has another prompt from now on, and does not tell.
                for server in (world.decode[0], world.decode[2]):
                    await server.stop()
                await world.ask(input_ids=prompt[::-1])
                await until(lambda: f"{world.decode[1].url} have gone silent" in caplog.text)
        finally:
            repeating.cancel()
            await asyncio.gather(repeating, return_exceptions=True)
            context.destroy(linger=0)

    run(job())


def test_it_is_said_of_events_that_they_are_of_no_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "NEVER", 2)
    caplog.set_level("INFO")
    prompt = list(range(400))

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        try:
            world = World(prefill=1, prefill_policy="cache_aware")
            world.prefill[0].info = publisher.described(replay_endpoint_port_base=None)
            async with world:
                told = {"meta_info": {"prompt_tokens": 400, "cached_tokens": 396}}
                world.prefill[0].answer = answers(told)
                await heard(publisher, await followed(world, 0))
                for _ in range(2):
                    await world.ask(input_ids=prompt)
                await until(lambda: "are of no use" in caplog.text)
                await world.idle()
                assert (await seen(world))[0] == "never hits"
                _, text = await world.get("/metrics")
                assert 'sglang_mooncake_router_event_streams{state="never hits"} 1' in text
                stream = await followed(world, 0)
                await publisher.publish(stored(*token_names(prompt, PAGE)))
                await until(lambda: len(stream) > 100)
                await world.ask(input_ids=prompt)
                await until(lambda: "are back" in caplog.text)
        finally:
            context.destroy(linger=0)

    run(job())
    assert caplog.text.count("are of no use") == 1


def test_it_is_said_once_that_a_cache_has_more_pages_than_are_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "PAGES_MAX", 2)

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        try:
            world = World(prefill=1, prefill_policy="cache_aware")
            world.prefill[0].info = publisher.described(replay_endpoint_port_base=None)
            async with world:
                stream = await followed(world, 0)
                await heard(publisher, stream)
                for left_out in (2, 4):
                    await publisher.publish(stored(left_out, 10 + left_out, 20 + left_out))
                    await until(lambda most=left_out: stream.left_out >= most)
                assert stream.state(0.0) == "live"
                await until(lambda: "more than the 2 pages" in caplog.text)
                _, text = await world.get("/v1/router")
                assert '"pages_left_out": 5' in text
        finally:
            context.destroy(linger=0)

    run(job())
    assert caplog.text.count("more than the 2 pages") == 1


def test_a_registered_cache_is_answered_for_while_its_publisher_is_there() -> None:
    prompt = list(range(40))
    at_a = {"longest_matched": 40, "DP": {"3": 40}, "GPU": 40, "CPU": 0, "DISK": 0}

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        repeating = asyncio.create_task(publisher.repeat())
        await publisher.publish(stored(*token_names(prompt, PAGE)))
        where = {
            "endpoint": f"tcp://127.0.0.1:{publisher.port}",
            "replay_endpoint": f"tcp://127.0.0.1:{publisher.replay_port}",
        }
        of = {"instance_id": "a", "tenant_id": "t", "dp_rank": 3}
        asked = {"model": "m", "token_ids": prompt, "tenant_id": "t"}
        try:
            async with World(prefill_policy="cache_aware") as world:
                told = {**of, **where, "type": "SGLang", "modelname": "m", "block_size": PAGE}
                _, said = await world.ask("/register", **told)
                assert said == {"status": "registered successfully", "instance_id": "a"}
                while (await world.ask("/query", **asked))[1] != {"t": {"a": at_a}}:
                    await asyncio.sleep(0.005)
                assert (await world.ask("/query", token_ids=prompt))[1] == {"default": {}}
                context.destroy(linger=0)
                while (await world.ask("/query", **asked))[1] != {"t": {}}:
                    await asyncio.sleep(0.005)
                _, said = await world.ask("/unregister", **of)
                assert said["removed_instances"] == ["a|t|3"]
                status, answer = await world.ask("/register", **{**told, "type": "vLLM"})
                assert (status, "vLLM" in str(answer)) == (400, True)
        finally:
            repeating.cancel()
            await asyncio.gather(repeating, return_exceptions=True)
            context.destroy(linger=0)

    run(job())


def test_registered_caches_share_room_and_give_it_back() -> None:
    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        known = Registered(pages_max=2)
        told = {"instance_id": "a", "block_size": PAGE}
        where = {"endpoint": f"tcp://127.0.0.1:{publisher.port}"}
        known.add(msgspec.convert({**told, **where}, Registration))
        (cache,) = known.all()
        clock = asyncio.get_running_loop().time
        async with aiohttp.ClientSession() as session:
            most = StreamsMax(0, 1)
            source = EventSource(session, tuple, lambda *_: (), known, {}, most, clock)
            following = asyncio.create_task(source.run())
            await until(lambda: cache.view.events is not None)
            stream = cache.view.events
            assert stream is not None
            await heard(publisher, stream)
            await publisher.publish(stored(2, 3))
            await until(lambda: stream.left_out)
            assert (len(stream), known.room.pages) == (2, 0)
            known.remove(msgspec.convert(told, Unregistration))
            await until(lambda: known.room.pages == 2)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        context.destroy(linger=0)

    run(job())


def test_a_long_prompt_is_named_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(LONG_NAMES + PAGE))
    threads = list[threading.Thread]()
    make = pages.token_digests

    def made(tokens: Sequence[int], page: int, seed: bytes = b"") -> list[bytes]:
        threads.append(threading.current_thread())
        return make(tokens, page, seed)

    monkeypatch.setattr(placement, "token_digests", made)
    monkeypatch.setattr(querying, "token_digests", made)

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        try:
            world = World(prefill=1, prefill_policy="cache_aware")
            world.prefill[0].info = publisher.described(
                block_size=1, replay_endpoint_port_base=None
            )
            async with world:
                await heard(publisher, await followed(world, 0))
                for asked in (prompt, prompt[:LONG_NAMES]):
                    assert (await world.ask(input_ids=asked))[0] == 200
                    assert (await world.ask("/query", token_ids=asked))[0] == 200
        finally:
            context.destroy(linger=0)

    run(job())
    is_main = [one is threading.main_thread() for one in threads]
    assert is_main == [False, False, True, True]


@pytest.mark.parametrize(
    ("files", "most"),
    [(-1, (3072, 1024)), (1 << 20, (3072, 1024)), (20_000, (833, 833)), (256, (11, 10))],
)
def test_half_of_the_open_files_are_for_streams_and_half_of_those_for_servers(
    files: int, most: tuple[int, int]
) -> None:
    assert streams_max(files) == most


@pytest.mark.slow
def test_more_streams_are_followed_than_libzmq_has_sockets_for_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """341 were all that there could be."""
    count = 350
    allow_open_files()

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        known = Registered()
        where = f"tcp://127.0.0.1:{publisher.port}"
        for rank in range(count):
            told = {"instance_id": "a", "dp_rank": rank, "endpoint": where, "block_size": PAGE}
            known.add(msgspec.convert(told, Registration))
        clock = asyncio.get_running_loop().time
        async with aiohttp.ClientSession() as session:
            most = StreamsMax(0, count)
            source = EventSource(session, tuple, lambda *_: (), known, {}, most, clock)
            following = asyncio.create_task(source.run())
            views = [cache.view for cache in known.all()]
            while not all(view.events is not None and view.events.batches for view in views):
                assert "cannot be followed" not in caplog.text
                await publisher.publish(stored(1))
                await asyncio.sleep(0.05)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        context.destroy(linger=0)

    run(job())


def test_a_server_whose_streams_are_too_many_is_known_by_what_it_was_sent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_source, "STREAMS_MAX", 3)
    monkeypatch.setattr(event_source, "ASK_AGAIN_S", 0.05)

    async def job() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        try:
            world = World(prefill=3, prefill_policy="cache_aware")
            for server in world.prefill:
                server.info = publisher.described()
            async with world:
                await until(lambda: "are not followed: those of 2 caches are" in caplog.text)

                def without() -> list[Server]:
                    return [one for one, (view,) in world.views.items() if view.events is None]

                await until(lambda: len(without()) == 1)
                (left_out,) = without()
                asked = next(one for one in world.prefill if one.url == left_out.url).others
                await until(lambda: len(asked) > 2)
                assert caplog.text.count("are not followed") == 1
                told = {"endpoint": "tcp://127.0.0.1:1", "block_size": 1, "instance_id": "a"}
                assert (await world.ask("/register", **told))[0] == 200
                status, answer = await world.ask("/register", **{**told, "instance_id": "b"})
                assert (status, "ulimit -n" in str(answer)) == (400, True)
                # One more leaves: there is room.
                gone = next(one for one in world.prefill if one.url != left_out.url)
                gone.health = 503
                world.known(gone).failed("gone", 0.0, 1)
                await until(lambda: world.views[left_out][0].events is not None)
        finally:
            context.destroy(linger=0)

    run(job())


async def decode_streams(world: World) -> list[str | None]:
    """The states of decode servers' streams; None of those that are not followed."""
    _, text = await world.get("/v1/router")
    every = [one["events"] for one in json.loads(text)["servers"]["decode"]]
    return [None if one is None else one["state"] for one in every]


async def seen(world: World) -> tuple[str, int]:
    """The state of the first stream, and the prefixes that were missed there."""
    _, text = await world.get("/v1/router")
    one = json.loads(text)["servers"]["prefill"][0]
    return one["events"]["state"], one["prefixes_missed"]


async def followed(world: World, at: int) -> EventStream:
    """What the router hears of a prefill server."""
    (view,) = world.views[world.known(world.prefill[at])]
    await until(lambda: view.events is not None)
    assert view.events is not None
    return view.events


async def heard(publisher: Publisher, stream: EventStream) -> None:
    """Publishes until the subscription has got through. What was repeated has told of its server
    before that, perhaps."""
    before = stream.batches
    while stream.batches == before or stream.age_s(0.0) is None:
        await publisher.publish(stored(1))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "info", [{}, {"kv_events": None}, {"kv_events": {"dp_size": 2}}, {"kv_events": 7}], ids=str
)
def test_a_server_without_events_that_can_be_used_is_known_by_what_it_was_sent(
    info: dict[str, Any],
) -> None:
    async def job() -> None:
        world = World(prefill_policy="cache_aware")
        if isinstance(info.get("kv_events"), dict):
            info["kv_events"] |= {"endpoint_port_base": 1, "block_size": 1}
        world.prefill[0].info = info
        async with world:
            await until(lambda: "/server_info" in [path for path, _ in world.prefill[0].others])
            assert (await world.ask(input_ids=[1]))[0] == 200
            (view,) = world.views[world.known(world.prefill[0])]
            assert view.events is None

    run(job())
