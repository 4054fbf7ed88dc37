# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank says of the way to a decode rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import te
from sglang_mooncake.links.prefill import way


@pytest.mark.parametrize(
    ("rate", "reason", "says"),
    [
        (0.0, "", "samehost"),
        (100e9, "", "samehost, 100 GB/s at best"),
        (3.125e9, "rdma: no device", "samehost, 3.12 GB/s at best (rdma: no device)"),
        (0.0, "rdma: no device", "samehost (rdma: no device)"),
    ],
)
def test_the_line_of_the_log_says_what_to_expect_and_why(
    rate: float, reason: str, says: str
) -> None:
    peer = SimpleNamespace(
        transport="samehost", bytes_per_s=rate, transport_reason=reason, is_encrypted=False
    )
    assert way(peer) == says


@pytest.mark.parametrize(("encrypt", "says"), [(False, "tcp"), (True, "tcp, encrypted")])
def test_engines_tell_it_of_their_peers(encrypt: bool, says: str) -> None:
    config = te.Config(transports=("tcp",), keys=(bytes(range(32)),), encrypt=encrypt)
    with te.Engine(config) as source, te.Engine(config) as target:
        peer = source.connect(target.card())
        assert way(peer) == says  # The loopback interface has no speed.
        assert source.stats().peer_bytes_per_s == {peer.id: 0.0}
