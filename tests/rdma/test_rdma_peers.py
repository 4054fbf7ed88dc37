# SPDX-License-Identifier: Apache-2.0
"""Peers that are killed or frozen, and what one of them loses on a single device."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from rdma_stream import RATE, Stream, engine, two_engines
from te_far import FarEngine
from testbed_nics import Nic, shaped, wait_for

import te

pytestmark = pytest.mark.rdma

#: Longer than a process of the emulated machine stands still, so that only a peer that is gone
#: fails its transfers.
STALL_S = 20.0
NBYTES = 8 << 20
# Of conditions. An emulated machine has one processor, of which a busy host gives it a part; what
# has no end of its own at all does not end in this time either.
WAIT_S = 60.0


@pytest.fixture
def far_engines(rdma_nics: tuple[Nic, ...]) -> Iterator[list[FarEngine]]:
    """Two, in processes of their own, each on a device of its own."""
    engines: list[FarEngine] = []
    try:
        for nic in rdma_nics[1:3]:
            config = {"transports": ["rdma"], "nics": [nic.device], "rails": 1}
            engines.append(FarEngine(**config))
        yield engines
    finally:
        for one in engines:
            one.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_fails_in_time_and_disturbs_no_other(
    rdma_nics: tuple[Nic, ...], far_engines: list[FarEngine], number: signal.Signals
) -> None:
    memory = np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)
    with shaped(rdma_nics[0].netdev, *RATE), engine(rdma_nics[:1], STALL_S) as source:
        region = source.register(memory)
        peers = [source.connect(far.bytes_card()) for far in far_engines]
        places = [far.register(nbytes=NBYTES) for far in far_engines]
        whole = [te.Blocks.of(region.address, place, NBYTES) for place in places]
        lost, kept = (peer.write(blocks) for peer, blocks in zip(peers, whole, strict=True))
        far_engines[0].signal(number)
        with pytest.raises(te.TransferFailed):
            lost.wait(WAIT_S)
        kept.wait(WAIT_S)
        assert (far_engines[1].memory(places[1]) == memory).all()
        peers[1].write(whole[1]).wait(WAIT_S)


def test_memory_gone_from_one_device_fails_nothing(
    rdma_nics: tuple[Nic, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Its rail breaks, and the others carry the rest."""
    count = min(4, len(rdma_nics) // 2)
    near, far = rdma_nics[:count], rdma_nics[count : 2 * count]
    with two_engines(near, far) as engines, Stream(*engines) as stream:
        stream.go_on()
        registration = stream.target_region.registration
        assert registration is not None
        registration.regions[0].close()
        stream.go_on()
        # An iWARP device only sees the stream end. The rail breaks anew each time that it is back,
        # and a later end may have another reason, so that all that were told count.
        wanted = "access" if near[0].driver == "rxe" else "flushed"

        def is_told() -> bool:
            told = [r.getMessage() for r in caplog.records if near[0].device in r.getMessage()]
            return any(wanted in reason for reason in told)

        wait_for(is_told, WAIT_S, f"{wanted!r} is told of {near[0].device}")
    assert stream.failures == []
