# SPDX-License-Identifier: Apache-2.0
"""Which transports a rank's engine has by its settings, and what of its memory they move."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from te_cuda import cuda

import te
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.transports import HandoverUnavailable, open_engine, register
from te import doctor

HOST, NBYTES = "127.0.0.1", 8192
TAG = 0xC0DA


def ranges(*arrays):
    return [(array.ctypes.data, array.nbytes) for array in arrays]


def open_with(**environment):
    return open_engine(Config.from_environment(environment), HOST, ())


def test_where_no_transport_is_named_all_are_used():
    with open_with() as engine:
        assert {"samehost", "tcp"} <= set(engine.stats().transports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "transport"), [({}, "samehost"), ({"MC_FORCE_TCP": "1"}, "tcp")]
)
def test_gpu_memory_goes_without_rdma_too(environment, transport):
    with cuda() as driver:
        near, far = driver.allocate(NBYTES), driver.allocate(NBYTES)
        near.view[:] = 7
        with open_with(**environment) as source, open_with() as target:
            register(source, [(near.address, NBYTES)], "none")
            register(target, [(far.address, NBYTES)], "tagged")
            target.expect(TAG)
            peer = source.connect(target.card())
            assert peer.transport == transport
            blocks = te.Blocks.of(near.address, far.address, NBYTES)
            assert peer.write(blocks, tag=TAG).wait(30) is te.Status.DONE
            assert (far.view == 7).all()
        driver.free(near)
        driver.free(far)


def test_rdma_that_was_asked_for_and_is_missing_is_told_with_what_the_doctor_finds():
    given = {"SGLANG_MOONCAKE_TRANSPORTS": "rdma", "SGLANG_MOONCAKE_NICS": "no_such_device"}
    says = "no RDMA device: .*; te doctor finds: error rdma-device-missing: .*modprobe mlx5_ib"
    with pytest.raises(HandoverUnavailable, match=says) as caught:
        open_with(**given)
    assert isinstance(caught.value.__cause__, te.DeviceError)


def test_what_the_doctor_cannot_explain_is_tes_own_error(monkeypatch):
    monkeypatch.setattr(doctor, "verdict", lambda *_: ())
    with pytest.raises(te.DeviceError):
        open_with(SGLANG_MOONCAKE_TRANSPORTS="rdma")


@pytest.fixture
def restricted(monkeypatch):
    """A machine on which no process may read the memory of another."""
    gathered = doctor.gather()
    facts = structs.replace(gathered, ptrace_scope=3, descriptors=64)
    monkeypatch.setattr("te.doctor.startup.gather", lambda root: facts)


@pytest.mark.parametrize(("is_first", "level"), [(True, "WARNING"), (False, "DEBUG")])
def test_the_first_rank_of_a_host_logs_the_doctors_verdict(restricted, caplog, is_first, level):
    caplog.set_level("DEBUG", "sglang_mooncake.sglang.transports")
    open_engine(Config.from_environment({}), HOST, (), is_first).close()
    (record,) = [one for one in caplog.records if "te doctor" in one.message]
    assert record.levelname == level
    assert "warning ptrace-restricted: kernel.yama.ptrace_scope is 3" in record.message
    assert "descriptors" not in record.message, "hints are left out"


def test_a_verdict_on_a_transport_that_is_not_used_is_not_logged(restricted, caplog):
    caplog.set_level("DEBUG")
    open_with(SGLANG_MOONCAKE_TRANSPORTS="tcp").close()
    assert "te doctor" not in caplog.text


def test_memory_is_registered_wholly_or_not_at_all():
    good = np.zeros(NBYTES, np.uint8)
    with open_with() as engine:
        with pytest.raises(HandoverUnavailable, match="cannot register the KV cache"):
            register(engine, [*ranges(good), (0, 4096)], "none")
        (region,) = register(engine, ranges(good), "tagged")
        assert region.remote == "tagged"


OLD, NEW, OTHER = (f"{name}-6f1d0c8a92e47b35b7e2f90a4c81d356" for name in ("old", "new", "other"))


@pytest.mark.parametrize(
    ("here", "there", "connects"),
    [
        (None, None, True),
        (NEW, NEW, True),
        (f"{OLD}\n{NEW}", NEW, True),
        (OLD, f"{NEW}\n{OLD}", True),
        (NEW, OTHER, False),
        (NEW, None, False),
        (None, NEW, False),
    ],
)
def test_engines_connect_whose_ranks_have_a_secret_in_common(here, there, connects):
    def open_one(secret):
        given = {} if secret is None else {"SGLANG_MOONCAKE_SECRET": secret}
        return open_with(SGLANG_MOONCAKE_TRANSPORTS="tcp", **given)

    with open_one(here) as source, open_one(there) as target:
        if connects:
            assert source.connect(target.card()).alive
            return
        with pytest.raises(te.ConnectError, match="give both the same secret"):
            source.connect(target.card())


@pytest.mark.parametrize(
    ("environment", "flag", "used", "source"),
    [
        ({}, (), (), "MC_TE_FILTERS or MC_TE_FILTERS_EXCLUDE"),
        ({"MC_TE_FILTERS_EXCLUDE": "a"}, (), ("!a",), "MC_TE_FILTERS or MC_TE_FILTERS_EXCLUDE"),
        ({"MC_TE_FILTERS": "a"}, ("b",), ("b",), "--disaggregation-ib-device"),
        ({"SGLANG_MOONCAKE_NICS": "c"}, ("b",), ("c",), "SGLANG_MOONCAKE_NICS"),
        (
            {"SGLANG_MOONCAKE_TOPOLOGY": "/t.json"},
            ("b",),
            (),
            "SGLANG_MOONCAKE_TOPOLOGY or MC_CUSTOM_TOPO_JSON",
        ),
    ],
)
def test_devices_that_are_not_there_are_said_with_what_asked_for_them(
    monkeypatch, environment, flag, used, source
):
    asked = []

    def refuse(config):
        asked.append(config.nics)
        raise te.TopologyError("no RDMA device matches 'a'; there are: none")

    monkeypatch.setattr(te, "Engine", refuse)
    with pytest.raises(HandoverUnavailable, match=f"there are: none; asked for by {source}"):
        open_engine(Config.from_environment(environment), HOST, flag)
    assert asked == [used]
