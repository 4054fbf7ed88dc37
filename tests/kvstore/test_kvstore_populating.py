# SPDX-License-Identifier: Apache-2.0
"""An owner has all pages of its memory soon after its start."""

from __future__ import annotations

import errno
import re
import threading
from pathlib import Path

import pytest
from store_lower_tier import owner_of
from store_makers import TIMEOUT_S, config, until
from store_meeting import owning

from kvstore import _bytes
from kvstore.memory.populating import STEP_BYTES, Populating

MIB = 1 << 20


def resident_kib(address: int) -> int:
    """Of the mapping that begins there."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^0*{address:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1])


def test_a_store_has_its_pages_before_they_are_used(directory: Path) -> None:
    with owning(config(directory, 32 * MIB)) as store:
        owner = owner_of(store)
        address = owner.card.headers_address
        until(lambda: resident_kib(address) >= owner._slab.nbytes // 1024, "the pages")


def test_it_ends_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began = threading.Event(), threading.Semaphore(0)
    done: list[int] = []

    def waits(at: int, _nbytes: int) -> int:
        done.append(at)
        began.release()
        gate.wait(TIMEOUT_S)
        return 0

    monkeypatch.setattr(_bytes, "populate", waits)
    one = Populating(0, 4 * STEP_BYTES + 5)
    assert began.acquire(timeout=TIMEOUT_S)
    ending = threading.Thread(target=one.close)
    ending.start()
    until(lambda: one._is_closing, "it is told")
    gate.set()
    ending.join(TIMEOUT_S)
    assert done == [0]
    one.close()


def test_the_last_step_ends_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []

    def populate(at: int, nbytes: int) -> int:
        done.append((at, nbytes))
        return 0

    monkeypatch.setattr(_bytes, "populate", populate)
    one = Populating(4096, STEP_BYTES + 8192)
    one._thread.join(TIMEOUT_S)
    assert done == [(4096, STEP_BYTES), (4096 + STEP_BYTES, 8192)]


@pytest.mark.parametrize(("failed", "is_told"), [(errno.EINVAL, False), (errno.ENOMEM, True)])
def test_a_kernel_that_does_not_give_them_costs_nothing(
    failed: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_bytes, "populate", lambda _at, _nbytes: failed)
    one = Populating(0, 4 * STEP_BYTES)
    one._thread.join(TIMEOUT_S)
    one.close()
    assert ("Cannot allocate memory" in caplog.text) is is_told
    assert caplog.text.count("the kernel does not give") == is_told


def test_the_kernels_answer_is_returned() -> None:
    assert _bytes.populate(4096, 4096) == errno.ENOMEM, "nothing is mapped there"
