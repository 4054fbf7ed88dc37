# SPDX-License-Identifier: Apache-2.0
"""Memory that a peer on the same host offers to be mapped: what could get shorter, would overlap,
is too much or comes late is refused."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from te_far import wait_until
from te_frames import AckStatus, Kind, descriptors, end
from te_host import PAGE, memory_file, say
from te_raw import (
    RawSource,
    dial_unix,
    host_hello,
    read_greeting,
)
from te_ring import RINGS_BYTES, make_rings

import te
from te.transports.samehost.messages import Shared


def ordinary_file(directory: Path, nbytes: int) -> int:
    path = directory / "file"
    path.write_bytes(bytes(nbytes))
    return os.open(path, os.O_RDWR)


def unsealed(_: Path, nbytes: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def unsealable(_: Path, nbytes: int) -> int:
    fd = os.memfd_create("unsealable")
    os.ftruncate(fd, nbytes)
    return fd


def pipe(_: Path, nbytes: int) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


SHORTENABLE = pytest.mark.parametrize("make", [ordinary_file, unsealed, unsealable, pipe])


@SHORTENABLE
def test_rings_in_a_file_that_can_get_shorter_are_refused(
    make: Callable[[Path, int], int], tmp_path: Path
) -> None:
    with te.Engine() as engine, dial_unix(engine.card()) as sock:
        fd = make(tmp_path, RINGS_BYTES)
        socket.send_fds(sock, [host_hello(sock, engine.card())], [fd])
        read_greeting(sock)
        assert sock.recv(1) == b""  # Closed, before anybody touches them.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)
        assert engine.stats().rails == 0


@SHORTENABLE
def test_memory_in_a_file_that_can_get_shorter_is_not_mapped(
    make: Callable[[Path, int], int], tmp_path: Path
) -> None:
    assert_not_mapped(make(tmp_path, PAGE), "can be made so")


def test_memory_that_can_be_taken_out_of_its_file_is_not_mapped() -> None:
    assert_not_mapped(make_rings(PAGE), "pages can be taken out of the memory file")


def assert_not_mapped(fd: int, why: str) -> None:
    """A peer that lends this page is told why, and its link goes on."""
    with te.Engine() as engine:
        card = engine.card()
        source = RawSource(card, "samehost", link=1)
        with source.sock:
            problem = say(card, Shared(PAGE, PAGE, 1, 1), fd, 1)
            os.close(fd)
            assert problem is not None
            assert why in problem
            source.send(end(1))
            assert source.ack().status is AckStatus.LANDED


# -- X16: holes


CHUNK = 64 << 10


def test_holes_of_a_mapping_are_not_charged_to_who_copies() -> None:
    """What the file has comes from it (nines), what it has not out of the source's memory (threes);
    and the file gets no page by that."""
    memory, source_memory = np.zeros(8 * CHUNK, np.uint8), np.full(8 * CHUNK, 3, np.uint8)
    here, there = int(source_memory.ctypes.data), int(memory.ctypes.data)
    with te.Engine() as engine:
        card = engine.card()
        engine.register(memory, remote="read-write")
        source = RawSource(card, "samehost", link=1)
        fd = memory_file(8 * CHUNK, b"\x09" * (2 * CHUNK + PAGE), CHUNK)
        pages = os.fstat(fd).st_blocks
        with source.sock:
            assert say(card, Shared(here, 8 * CHUNK, 1, 1), fd, 1) is None
            for turn, (at, nbytes, digit) in enumerate(
                [
                    (0, 8 * CHUNK, 3),
                    (CHUNK, 2 * CHUNK, 9),  # Whole chunks, which are not looked for again.
                    (CHUNK + 1, 2 * CHUNK - 2, 9),
                    (3 * CHUNK, PAGE, 9),  # The first page of a chunk with holes.
                    (3 * CHUNK, PAGE + 1, 3),
                    (3 * CHUNK + PAGE, 1, 3),
                    (8 * CHUNK - 1, 1, 3),
                ],
                1,
            ):
                memory[:] = 0
                source.send(descriptors(Kind.PULL, turn, [(here + at, there + at, nbytes)]))
                assert source.ack().status is AckStatus.LANDED
                assert (memory[at : at + nbytes] == digit).all()
                assert np.count_nonzero(memory) == nbytes
            assert os.fstat(fd).st_blocks == pages
        os.close(fd)


# -- B5: how much a peer may have mapped


def test_mappings_are_bounded_and_do_not_overlap() -> None:
    with te.Engine() as engine:
        card = engine.card()
        source = RawSource(card, "samehost", link=2)
        with source.sock:
            fd = memory_file(PAGE)
            for i in range(1, 1025):
                assert say(card, Shared(i * PAGE, PAGE, i, i), fd, 2) is None
            too_many = say(card, Shared(2000 * PAGE, PAGE, 2000, 1025), fd, 2)
            assert too_many is not None
            assert "too many for a link" in too_many
            assert say(card, Shared(PAGE, PAGE, 1, 1026), None, 2) is None
            assert say(card, Shared(PAGE, PAGE, 1, 1027), fd, 2) is None
            assert say(card, Shared(2 * PAGE, PAGE, 2, 1028), None, 2) is None
            for overlapping in (Shared(PAGE + 1, PAGE, 3000, 1029), Shared(1, PAGE, 3001, 1030)):
                problem = say(card, overlapping, fd, 2)
                assert problem is not None
                assert "mapped already" in problem
            wraps = say(card, Shared(2**64 - 1, PAGE, 3002, 1031), fd, 2)
            assert wraps is not None
            assert "not an address range" in wraps
            os.close(fd)
            huge = memory_file(1 << 43)
            problem = say(card, Shared(2 * PAGE, PAGE, 2, 1032), huge, 2)
            os.close(huge)
            assert problem is not None
            assert "too many for a link" in problem
        wait_until(lambda: engine.stats().rails == 0, "the link has ended")


def test_a_word_about_memory_that_comes_late_counts_nothing() -> None:
    with te.Engine() as engine:
        card = engine.card()
        source = RawSource(card, "samehost", link=4)
        with source.sock:
            fd = memory_file(PAGE)
            assert say(card, Shared(PAGE, PAGE, 7, 2), None, 4) is None
            late = "a later greeting about memory came first"
            assert say(card, Shared(PAGE, PAGE, 7, 1), fd, 4) == late
            assert say(card, Shared(PAGE, PAGE, 7, 2), fd, 4) == late
            assert say(card, Shared(PAGE, PAGE, 8, 3), fd, 4) is None
            # Of an earlier region at that address: not this mapping.
            assert say(card, Shared(PAGE, PAGE, 7, 4), None, 4) is None
            problem = say(card, Shared(PAGE, PAGE, 9, 5), fd, 4)
            assert problem is not None
            assert "mapped already" in problem
            os.close(fd)
