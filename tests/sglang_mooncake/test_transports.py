# SPDX-License-Identifier: Apache-2.0
"""Which transports a rank's engine has, by its settings and by where its KV cache lies."""

from __future__ import annotations

import numpy as np
import pytest
from te_cuda import fake_cuda

import te
from sglang_mooncake.config import Config
from sglang_mooncake.transports import HandoverUnavailable, open_engine, register

HOST, NBYTES = "127.0.0.1", 8192


@pytest.fixture
def memory():
    memory = np.zeros(NBYTES, np.uint8)
    with fake_cuda(memory.ctypes.data, NBYTES):
        yield memory


def ranges(*arrays):
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def open_for(memory, **environment):
    return open_engine(Config.from_environment(environment), HOST, (), ranges(memory))


def test_host_memory_has_all_transports_that_there_are():
    with open_for(np.zeros(NBYTES, np.uint8)) as engine:
        assert "tcp" in engine.stats().transports


def test_gpu_memory_without_a_named_transport_takes_rdma_alone(memory):
    """An engine that had a choice would go without devices of that name."""
    with pytest.raises(HandoverUnavailable, match="no RDMA device to use here: "):
        open_engine(Config(), HOST, ("no_such_device",), ranges(np.zeros(9, np.uint8), memory))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MC_FORCE_TCP", "1", "MC_FORCE_TCP=1 asks for tcp"),
        ("SGLANG_MOONCAKE_TRANSPORTS", "rdma,tcp", "SGLANG_MOONCAKE_TRANSPORTS asks for rdma,tcp"),
    ],
)
def test_gpu_memory_that_shall_go_another_way_is_refused_with_who_asked(memory, name, value, says):
    with pytest.raises(HandoverUnavailable, match=says):
        open_for(memory, **{name: value})


def test_rdma_that_was_asked_for_and_is_missing_is_tes_own_error():
    given = {"SGLANG_MOONCAKE_TRANSPORTS": "rdma", "SGLANG_MOONCAKE_NICS": "no_such_device"}
    with pytest.raises(te.DeviceError):
        open_for(np.zeros(9, np.uint8), **given)


def test_memory_is_registered_wholly_or_not_at_all():
    good = np.zeros(NBYTES, np.uint8)
    with open_for(good) as engine:
        with pytest.raises(HandoverUnavailable, match="cannot register the KV cache"):
            register(engine, [*ranges(good), (0, 4096)], "none")
        (region,) = register(engine, ranges(good), "tagged")
        assert region.remote == "tagged"
