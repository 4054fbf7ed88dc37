# SPDX-License-Identifier: Apache-2.0
"""Strangers at the port of rdma_cm. What becomes of those who are expected is in
``tests/rdma/test_verbs_cm.py``."""

from __future__ import annotations

import secrets
from types import SimpleNamespace
from typing import Any

import pytest

import te
from te.connect.throttle import BURST
from te.transports.rdma import cm
from te.transports.rdma.messages import RailOffer

pytestmark = pytest.mark.pure

STRANGERS = 500


class Listener:
    """What rdma_cm has, without a device."""

    port, fd = 5000, -1

    def __init__(self, *tokens: bytes) -> None:
        self._tokens = tokens

    def requests(self) -> list[Any]:
        return [SimpleNamespace(token=token) for token in self._tokens]


def accepting(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Any], cm.CmAcceptor, tuple[Any, RailOffer, Any]]:
    """What it would have done in a thread; and for a rail its link, offer and device."""
    monkeypatch.setattr(cm, "CmListener", lambda *_: Listener())
    work: list[Any] = []
    local: Any = SimpleNamespace(config=te.Config(), run=work.append)
    acceptor = cm.CmAcceptor(local, lambda *_: None)
    link: Any = SimpleNamespace(number=3)
    nic: Any = SimpleNamespace(index=0, name="nic", gids=[SimpleNamespace(raw=bytes(16))])
    offer = RailOffer(rail=1, epoch=1, nic=0, remote_nic=0, gid=bytes(16), remote_gid_index=0)
    return work, acceptor, (link, offer, nic)


def test_only_who_is_expected_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work, acceptor, rail = accepting(monkeypatch)
    answer = acceptor.expect(*rail, 1)
    known = answer.token[:-16]
    tokens = [known + secrets.token_bytes(16) for _ in range(STRANGERS)]
    acceptor._on_ready(Listener(b"", b"short", *tokens))  # type: ignore[arg-type]
    assert not work
    assert BURST <= caplog.text.count("nobody expects any more") < BURST + STRANGERS // 10
    acceptor._on_ready(Listener(answer.token, answer.token))  # type: ignore[arg-type]
    assert len(work) == 1, "a token counts once"


def test_who_asks_again_is_expected_though_what_it_asked_first_is_done_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, acceptor, rail = accepting(monkeypatch)
    again = acceptor.expect(*rail, 2)
    acceptor.expect(*rail, 1)
    acceptor._on_ready(Listener(again.token))  # type: ignore[arg-type]
    assert len(work) == 1
