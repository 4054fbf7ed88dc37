# SPDX-License-Identifier: Apache-2.0
"""What a machine lacks for RDMA is said in one sentence, with the fix: by the engine that wanted it
and by ``te doctor``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from rdma_pair import TIMEOUT_S, rdma_pair
from testbed_nics import Nic, cut, run, wait_for

import te

pytestmark = pytest.mark.rdma

MIB = 1 << 20
ENGINE = """
import sys
import te
try:
    with te.Engine(te.Config(transports=("rdma",), nics=(sys.argv[1],))) as engine:
        engine.register(bytearray(1 << 20))
except te.Error as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def complaint(nic: Nic, *within: str) -> str:
    """What an engine says that should use the device, in a process started by ``within``."""
    return said([*within, sys.executable, "-c", ENGINE, nic.device], 1)


def doctor(*within: str) -> str:
    return said([*within, sys.executable, "-m", "te.cli", "doctor", "--transport", "rdma"], 2)


def said(command: Sequence[str], status: int) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_port_that_is_down(rdma_nics: tuple[Nic, ...]) -> None:
    nic = rdma_nics[0]
    with cut(nic.netdev):
        wait_for(lambda: nic.state() == "DOWN", TIMEOUT_S, "its state")
        told = complaint(nic)
    assert told.startswith("DeviceError: "), told
    assert f"bring its link up (ip link set {nic.netdev} up)" in told
    wait_for(lambda: nic.state() == "ACTIVE", TIMEOUT_S, "its state")


HIDDEN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs t /dev/infiniband; exec "$@"', "sh")


def test_no_dev_infiniband(rdma_nics: tuple[Nic, ...]) -> None:
    told = complaint(rdma_nics[0], *HIDDEN)
    assert told.startswith("DeviceError: "), told
    assert "in a container start it with --device=/dev/infiniband" in told
    seen = doctor(*HIDDEN)
    assert "error    device-refused" in seen
    assert "In a container: start it with --device=/dev/infiniband" in seen


LIMITED = (
    *("prlimit", "--memlock=65536:65536"),
    *("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"),
)


def test_too_little_locked_memory(rdma_nics: tuple[Nic, ...]) -> None:
    told = complaint(rdma_nics[0], *LIMITED)
    assert told.startswith("RegistrationError: "), told
    assert "ulimit -l unlimited" in told
    seen = doctor(*LIMITED)
    assert "error    memlock-low" in seen
    assert "This process may lock 64 KiB of memory." in seen


@contextmanager
def without_address(nic: Nic) -> Iterator[None]:
    ipv6 = f"/proc/sys/net/ipv6/conf/{nic.netdev}/disable_ipv6"
    run("sh", "-c", f"echo 1 >{ipv6}; ip addr flush dev {nic.netdev}")
    try:
        yield
    finally:
        run("sh", "-c", f"echo 0 >{ipv6}; ip addr add {nic.address}/24 dev {nic.netdev}")
        with cut(nic.netdev):  # Its routes come back with its link.
            pass
        wait_for(lambda: nic.state() == "ACTIVE", TIMEOUT_S, "its state")


@pytest.mark.driver("rxe")
def test_a_gid_that_no_network_carries(rdma_nics: tuple[Nic, ...]) -> None:
    with without_address(rdma_nics[0]):
        says = f"give {rdma_nics[0].netdev} one of the network"
        with pytest.raises(te.ConnectError, match=says), rdma_pair(rdma_nics, 1, MIB):
            pass


@pytest.mark.driver("siw")
@pytest.mark.each_run
def test_a_device_without_an_address(rdma_nics: tuple[Nic, ...]) -> None:
    with without_address(rdma_nics[0]):
        told = complaint(rdma_nics[0])
        assert told.startswith("DeviceError: "), told
        assert f"no IP address; give {rdma_nics[0].netdev} one" in told
