# SPDX-License-Identifier: Apache-2.0
"""Overlap scheduling on prefill: sends that name an event, before which their pages are garbage.

Events are those of a stand-in for a GPU's streams (`cpu_serving/shim/cpu_overlap.py`).
"""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
import requests
from cpu_serving.expectations import UNVERIFIED, Layout, Serving
from cpu_serving.overlap import Overlap, events_ignored, read_counts
from cpu_serving.traffic import (
    Answer,
    compare,
    gather_answers,
    make_shared_requests,
    run,
    send_all,
)

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

# Small, so that most prompts have chunks; SGLang keeps the last, partial page of one for the next.
CHUNK = 64
PAGE = 16
# Far beyond what is needed, far below forever.
BOUND_S = 180.0


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout.equal(
        "overlap",
        page_size=PAGE,
        chunked_prefill_size=CHUNK,
        overlap=Overlap(delay_ms=60),
        extra_env=UNVERIFIED,
    )


def test_tokens_are_equal_although_pages_are_filled_late(serving: Serving) -> None:
    folder = serving.pair.prefill.stats_dir
    before = read_counts(folder)
    serving.assert_equal(make_shared_requests(32, 300, seed=21), concurrency=16)
    seen = read_counts(folder)
    assert seen.early_prefixes > before.early_prefixes, "no prefix was sent before its forward"
    assert seen.waits > before.waits, "no send came before its event"
    assert seen.pinned_copies > before.pinned_copies, "the scheduler waited for page numbers itself"


def test_without_the_wait_the_tokens_differ(serving: Serving) -> None:
    """The negative control: what was asked for above can fail, and does for want of the wait."""
    asked = make_shared_requests(24, 300, seed=22)
    with events_ignored(serving.pair.prefill.stats_dir):
        got = send_all(serving.url, asked, concurrency=12)
    assert not [answer.error for answer in got if answer.error]
    assert compare(serving.expected(asked), got), "nobody read a page before it was filled"


def test_aborts_while_pages_are_being_filled(serving: Serving) -> None:
    folder = serving.pair.prefill.stats_dir
    asked = make_shared_requests(24, 400, seed=23)

    async def abort_all(session: aiohttp.ClientSession) -> list[Answer]:
        before = read_counts(folder).early_prefixes
        sent = asyncio.create_task(gather_answers(session, serving.url, asked, len(asked)))
        while read_counts(folder).early_prefixes == before:
            assert not sent.done(), "all were answered without an early send"
            await asyncio.sleep(0.01)
        for server in (serving.pair.prefill, serving.pair.decode):
            async with session.post(f"{server.url}/abort_request", json={"abort_all": True}) as got:
                assert got.status == 200
        return await sent

    got = run(abort_all, BOUND_S)
    failed = [i for i, answer in enumerate(got) if answer.error]
    assert failed, "nothing was aborted"
    assert set(compare(serving.expected(asked), got)) == set(failed)
    serving.assert_equal(make_shared_requests(16, 300, seed=24), concurrency=16)


def test_warm_up_and_health_requests_are_served(serving: Serving) -> None:
    """SGLang gives them the address of nobody, and its own sender and receiver."""
    for server in (serving.pair.prefill, serving.pair.decode):
        assert "/generate HTTP/1.1" in server.process.log_text(), "no warm-up request"
        answer = requests.get(f"{server.url}/health_generate", timeout=60)
        assert answer.status_code == 200
