# SPDX-License-Identifier: Apache-2.0
"""Connections that the kernel encrypts: the socket by itself, and how two engines come to agree on
it. That transfers are as over plain TCP, the contract's tests show (te_contract.py); what somebody
on the way can do, test_te_encryption_way.py."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from te_far import wait_until

import te
from te.handshake import decode_card, encode
from te.transports.tcp import kernel_tls
from te.transports.tcp import transport as tcp

A, B = bytes(range(32)), bytes(range(32, 64))
TIMEOUT_S = 60.0
ENCRYPTED = te.Config(
    transports=("tcp",), keys=(b"k" * 32,), encrypt=True, rails=2,
    connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S,
)  # fmt: skip


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), TIMEOUT_S)
        there, _ = server.accept()
        there.settimeout(TIMEOUT_S)
    with here, there:
        yield here, there


def connections() -> int:
    """That the kernel encrypts, of all processes."""
    lines = Path("/proc/net/tls_stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)["TlsCurrTxSw"])


@pytest.mark.rdma
def test_both_directions_are_encrypted_with_keys_of_their_own(sockets) -> None:
    here, there = sockets
    kernel_tls.encrypt(here.fileno(), A, B)
    here.sendall(b"sent before the other side has its keys")
    kernel_tls.encrypt(there.fileno(), B, A)
    assert there.recv(100) == b"sent before the other side has its keys"
    there.sendall(b"answer")
    assert here.recv(100) == b"answer"


@pytest.mark.rdma
def test_the_wire_has_no_plain_byte_and_another_key_reads_none(sockets) -> None:
    here, there = sockets
    kernel_tls.encrypt(here.fileno(), A, B)
    here.sendall(b"confidential")
    record = there.recv(1000, socket.MSG_PEEK)
    assert record[:3] == b"\x17\x03\x03", "TLS's record of application data"
    assert b"confidential" not in record
    kernel_tls.encrypt(there.fileno(), B, B)
    with pytest.raises(OSError, match="Bad message") as caught:
        there.recv(100)
    assert caught.value.errno == errno.EBADMSG


@pytest.mark.rdma
def test_engines_on_hosts_that_can_do_it_use_it() -> None:
    before = connections()
    with te.Engine(ENCRYPTED) as source, te.Engine(ENCRYPTED) as target:
        data, there = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
        source.register(data)
        target.register(there)
        tag = te.new_tag()
        target.expect(tag)
        peer = source.connect(target.card())
        blocks = te.Blocks.of(data.ctypes.data, there.ctypes.data, len(data))
        peer.write(blocks, tag).wait(TIMEOUT_S)
        assert np.array_equal(data, there)
        assert peer.is_encrypted
        # The target encrypts its end of a rail once it has welcomed the source.
        wait_until(lambda: connections() == before + 4, "both ends of two rails")
    wait_until(lambda: connections() == before, "the connections are closed")


@pytest.mark.parametrize("kernels", ["source", "target", "neither"])
def test_records_serve_where_a_kernel_cannot(kernels: str, monkeypatch) -> None:
    """A host's kernel cannot load a module that the other's can."""

    def engine(side: str) -> te.Engine:
        problem = None if kernels == side else "no module"
        monkeypatch.setattr(kernel_tls, "problem", lambda: problem)
        return te.Engine(ENCRYPTED)

    monkeypatch.setattr(kernel_tls, "encrypt", None)  # is not called
    with engine("source") as source, engine("target") as target:
        assert source.connect(target.card()).is_encrypted


def test_a_source_that_insists_on_the_kernel_is_told(monkeypatch) -> None:
    monkeypatch.setattr(kernel_tls, "problem", lambda: "no module")
    with te.Engine(ENCRYPTED) as target:
        monkeypatch.setattr(kernel_tls, "problem", lambda: None)
        card = decode_card(target.card())
        lie = encode(msgspec.structs.replace(card, offers=card.offers | {"tcp": tcp._KERNEL}))
        with (
            te.Engine(ENCRYPTED) as source,
            pytest.raises(te.ConnectError, match="kernel of this engine's host cannot encrypt"),
        ):
            source.connect(lie)


def test_a_kernel_that_fails_after_all_sends_nothing_in_plain(monkeypatch) -> None:
    def fails(fd: int, out: bytes, into: bytes) -> None:
        raise OSError(errno.ENOENT, "No such module")

    monkeypatch.setattr(kernel_tls, "problem", lambda: None)
    monkeypatch.setattr(kernel_tls, "encrypt", fails)
    with (
        te.Engine(replace(ENCRYPTED, rails=1)) as source,
        te.Engine(ENCRYPTED) as target,
        pytest.raises(te.ConnectError, match="No such module"),
    ):
        source.connect(target.card())


def test_a_kernel_that_fails_at_the_target_alone_ends_the_link(monkeypatch) -> None:
    """The source has been welcomed by then."""
    ours: list[int] = []

    def encrypt(fd: int, out: bytes, into: bytes) -> None:
        sock = socket.socket(fileno=fd)
        port = sock.getsockname()[1]
        sock.detach()
        if port in ours:
            raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(kernel_tls, "problem", lambda: None)
    monkeypatch.setattr(kernel_tls, "encrypt", encrypt)
    with te.Engine(replace(ENCRYPTED, rails=1)) as source, te.Engine(ENCRYPTED) as target:
        ours.append(decode_card(target.card()).port)
        data, there = np.ones(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
        source.register(data)
        target.register(there)
        tag = te.new_tag()
        target.expect(tag)
        peer = source.connect(target.card())
        blocks = te.Blocks.of(data.ctypes.data, there.ctypes.data, len(data))
        with pytest.raises(te.TransferFailed):
            peer.write(blocks, tag).wait(TIMEOUT_S)
        assert not there.any()
        wait_until(lambda: not peer.alive, "the link has ended")


def test_why_the_kernel_cannot(monkeypatch) -> None:
    monkeypatch.setattr(kernel_tls, "_CHACHA20_POLY1305", 999)
    found = kernel_tls.problem.__wrapped__()
    assert found is not None
    assert found.startswith("the kernel has no TLS with ChaCha20-Poly1305 for sockets (")
