# SPDX-License-Identifier: Apache-2.0
"""The fixtures of the contract's tests: each runs over every transport (te_contract.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from te_contract import WAYS, Pair, Way, paired

import te
from te import status
from te.fences import Fence
from te.transports.rdma import direct, link, transport
from te.transports.tcp import kernel_tls

#: Less than the time-out of a test.
PATIENCE_S: Final = 30.0


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """What nobody holds up has the time of a loaded machine, where a thread may stand still for
    seconds: engines that close, what is fenced or taken back, who has connected and is about to
    call, who is asked, who looks into another process's memory, and who makes a rail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("te.engine.CLOSE_TIMEOUT_S", PATIENCE_S)
        patch.setattr("te.connect.admission.FIRST_BYTE_TIMEOUT_S", PATIENCE_S)
        patch.setattr(status.ask, "__defaults__", (None, PATIENCE_S))
        patch.setattr("te.transports.samehost.reach.LOOK_TIMEOUT_S", PATIENCE_S)
        for waits in (te.Engine.fence, te.Engine.deregister, Fence.wait, status.StatusSocket.close):
            patch.setattr(waits, "__defaults__", (PATIENCE_S,))
        for module in (direct, link, transport):
            patch.setattr(module, "BUILD_TIMEOUT_S", PATIENCE_S)
        patch.setattr(link, "PROBE_TIMEOUT_S", PATIENCE_S)
        yield


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has all lines about strangers, of whom many come to an engine that tests share."""
    monkeypatch.setattr("te.connect.throttle.SILENCE_S", 0.0)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    assert isinstance(request.param, Way)
    return request.param


@pytest.fixture
def pair(way: Way) -> Iterator[Pair]:
    with paired(way, segment_bytes=1 << 18) as pair:  # Megabytes are several segments.
        yield pair


@pytest.fixture
def by_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines encrypt in records of te's, on a host whose kernel could, too."""
    monkeypatch.setattr(kernel_tls, "problem", lambda: "it is left out by a test")
