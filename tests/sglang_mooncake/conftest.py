# SPDX-License-Identifier: Apache-2.0
"""Settings of the tests of the hand-over."""

from __future__ import annotations

import pytest
from handover import NEVER_S

from bootstrap_server import BootstrapClient
from bootstrap_server.admission import refusals
from bootstrap_server.client import lease
from sglang_mooncake import control, digest_thread, fences, gpu_events, kept_bytes, prefill_side
from sglang_mooncake.explain.elsewhere import ask_there
from sglang_mooncake.links import decode, sockets
from sglang_mooncake.rooms import prefill_room
from te import status
from te.transports.samehost import reach


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that no setting lengthens pass only where a test sets them: a loaded machine stops
    any thread for seconds."""
    for module, name in [
        (control, "_CLOSE_TIMEOUT_S"),
        (digest_thread, "_CLOSE_TIMEOUT_S"),
        (fences, "_CLOSE_TIMEOUT_S"),
        (gpu_events, "_CLOSE_TIMEOUT_S"),
        (kept_bytes, "_CLOSE_TIMEOUT_S"),
        (lease, "_CLOSE_DEADLINE_S"),
        (refusals, "LOG_EVERY_S"),
        (prefill_side, "_START_TIMEOUT_S"),
        (decode, "CONNECT_S"),
        (decode, "DIAL_S"),
        (status, "CONNECTION_TIMEOUT_S"),
        (reach, "LOOK_TIMEOUT_S"),
    ]:
        monkeypatch.setattr(module, name, NEVER_S)
    monkeypatch.setattr(BootstrapClient.__init__, "__defaults__", (NEVER_S,))
    monkeypatch.setattr(status.ask, "__defaults__", (None, NEVER_S))
    monkeypatch.setattr(ask_there, "__defaults__", (NEVER_S,))
    monkeypatch.setattr(sockets, "_HANDSHAKE_MS_MAX", int(NEVER_S * 1_000))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill room ends soon after an abort whose request never comes."""
    monkeypatch.setattr(prefill_room, "ABORT_GRACE_S", 0.1)
