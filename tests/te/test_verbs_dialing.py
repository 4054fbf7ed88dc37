# SPDX-License-Identifier: Apache-2.0
"""A call that the kernel keeps does not keep its caller."""

from __future__ import annotations

import errno
import threading

import pytest

from te.verbs import dialing
from te.verbs.dialing import within

pytestmark = pytest.mark.pure

TIMEOUT_S = 60.0


def test_what_the_call_returns():
    left: list[float] = []
    assert within(lambda left_s: left.append(left_s) or 7, "x", TIMEOUT_S) == 7
    assert 0 < left[0] <= TIMEOUT_S


@pytest.mark.parametrize("error", [OSError(errno.ECONNREFUSED, "no"), TimeoutError("its own")])
def test_what_the_call_raises(error: Exception):
    def call(_: float) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        within(call, "x", TIMEOUT_S)
    assert raised.value is error


def test_a_call_that_does_not_return_is_given_up():
    returns = threading.Event()
    with pytest.raises(OSError, match=r"rdma_connect: no answer within 0.1 s") as raised:
        within(lambda _: returns.wait(TIMEOUT_S), "rdma_connect", 0.1)
    assert raised.value.errno == errno.ETIMEDOUT
    returns.set()


def test_calls_that_were_given_up_are_counted_until_they_return(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialing, "_free", threading.BoundedSemaphore(2))
    returns = threading.Event()
    for _ in range(2):
        with pytest.raises(OSError, match="no answer within"):
            within(lambda _: returns.wait(TIMEOUT_S), "x", 0.05)
    with pytest.raises(OSError, match="64 connections of this process are being tried already"):
        within(lambda _: None, "x", 0.05)
    returns.set()
    assert within(lambda _: 1, "x", TIMEOUT_S) == 1


def test_without_a_thread_the_place_is_free_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dialing, "_free", threading.BoundedSemaphore(1))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="x: can't start new thread"):
            within(lambda _: 1, "x", TIMEOUT_S)
    assert within(lambda _: 1, "x", TIMEOUT_S) == 1
