# SPDX-License-Identifier: Apache-2.0
from typing import Final

import numpy as np
import numpy.typing as npt

KIND_WRITE: Final[int]
KIND_READ: Final[int]
FRAME_BLOCKS_MAX: Final[int]
RAILS_LIMIT: Final[int]
WORKERS_LIMIT: Final[int]
RINGS_NBYTES: Final[int]
NICS_LIMIT: Final[int]
PIECES_LIMIT: Final[int]
RECEIVE_DEPTH: Final[int]
RANGES_LIMIT: Final[int]
MAY_READ: Final[int]
MAY_WRITE_TAGGED: Final[int]
MAY_WRITE_UNTAGGED: Final[int]

def read_process(pid: int, address: int, nbytes: int) -> bytes:
    """process_vm_readv(2); ``OSError``."""

def frame_rules() -> list[
    tuple[int, str, str, int, int, int, bool, str, list[tuple[int, int, int, str]]]
]:
    """The table of ``wire.h``; ``te.plane.wire`` gives its parts names."""

def frame_layouts() -> list[tuple[str, int, list[tuple[str, int, int, int, str]]]]:
    """The structs of ``wire.h``, the header first: name, bytes, and for each member its name,
    offset, bytes, length of the array, meaning."""

def frame_limits() -> dict[str, int]:
    """The numbers of ``wire.h``, and what else of the plane a peer must keep to, by their names."""

def ring_layout() -> dict[str, int]:
    """Offsets in the head of a ring, by name."""

def check_frame(header: bytes, over: int, from_source: bool) -> int | str:
    """What the plane makes of a header that came over a link: how many bytes of items follow, or
    what is wrong with it. ``over`` is a ``te.plane.wire.Over``. ``ValueError`` if these are not the
    bytes of one header."""

def numa_node(address: int) -> int:
    """Where the page is that the address lies on; -1 if there is none yet, or the kernel does not
    tell."""

class Engine:
    """Regions, tags, links and workers of one engine.

    Calls keep the interpreter lock and take microseconds, unless they say otherwise.
    """

    def __init__(
        self,
        workers: int,
        stall_s: float,
        rail_s: float,
        spin_s: float,
        segment_bytes: int,
        segment_blocks: int,
    ) -> None: ...
    def work(self, index: int) -> None:
        """The life of a worker; without the interpreter lock until ``stop``."""

    def stop(self) -> None:
        """Asks the workers to end every link and then themselves."""

    def add_region(
        self, start: int, end: int, serial: int, rights: int, is_shared: bool, keys: bytes = b""
    ) -> None:
        """Overlaps no other; serials rise. ``rights``: what peers may do there, bits of
        ``te.memory.RIGHTS``. Shared: peers on this host may map it. ``keys``: an array of
        ``te.verbs.fabric.KEY`` that covers the region, for links over RDMA."""

    def remove_region(self, serial: int, timeout_s: float) -> int:
        """Waits, without the lock, for transfers that read from it, takes it away, and waits for
        landings under way; 0.

        Or the number of unfinished transfers that read from it, and then it was not taken away; or
        -1 when a landing did not end in time: it was taken away, and the next call waits again.
        """

    def open_tag(
        self, value: int, peer: bytes = b"", ranges: bytes | None = None
    ) -> tuple[bool, bool]:
        """Opens it; whether it was not known, and whether it is open. Known and not open: it was
        revoked, and that is not confirmed yet. ``peer``: as ``te.tags.packed_peer`` makes it; empty
        for all. ``ranges``: pairs of u64 (start, end), none empty, in any order; None for all that
        the regions allow. ``ValueError`` for too many; then it is not opened."""

    def arrived(self, value: int) -> int:
        """Transfers that have landed under the tag; 0 if it is not known."""

    def arrived_nbytes(self, value: int) -> int:
        """Payload of those transfers in bytes; 0 if the tag is not known."""

    def revoke_tag(self, value: int) -> Revocation | None:
        """Closes it: no landing begins any more, and nothing is granted. None if it is not known.
        It stays known until ``Revocation.forget``; each call says the same."""

    def link(
        self,
        is_incoming: bool,
        is_pull: bool,
        pid: int,
        is_direct: bool = False,
        pidfd: int = -1,
    ) -> LinkHandle:
        """A link without rails yet. Direct: its one connection carries words about RDMA. Pull: the
        memory of the process ``pid`` is copied for as long as ``pidfd`` (pidfd_open(2), taken over)
        says that it lives; the link dies with it."""

    def nic_failed(self, nic: int, code: int) -> None:
        """Has every rail by that RDMA device given up for the reason ``code``, at either side."""

    def look_at_pairs(self) -> None:
        """After events of devices: has the workers look for queue pairs that are broken."""

    @property
    def events_fd(self) -> int:
        """Readable when ``events`` has something."""

    def events(self) -> list[tuple[int, int, int, int, int, str]]:
        """(link, rail, epoch, code, errno, text) of links that died, with rail -1, and of rails
        over RDMA that came up or were lost."""

    def wait_notices(self) -> list[int]:
        """Blocks, without the lock, until transfers that were subscribed to have an outcome."""

    def wake_notices(self) -> None:
        """Has ``wait_notices`` return."""

    def counters(self) -> tuple[int, int, int, int, int, int, int]:
        """Bytes sent and received, rails out and in, transfers done, failed and cancelled."""

class Revocation:
    """A tag that was revoked; it is confirmed once both waits have returned True."""

    def await_landings(self, timeout_s: float) -> bool:
        """Waits, without the lock, for landings under the tag; False when one did not end."""

    @property
    def granted(self) -> int:
        """Transfers that may still be written over RDMA; it only falls once no landing is under
        way."""

    def await_grants(self, timeout_s: float) -> bool:
        """Waits, without the lock, until there are none."""

    def forget(self) -> int:
        """Confirmed: the tag may be opened anew. The last count of arrivals."""

class LinkHandle:
    """All rails between two engines that one side opened. The link ends with its last handle."""

    @property
    def number(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    def name_peer(self, peer: bytes) -> None:
        """Of an incoming link, before its first rail: the source, with its epoch, as
        ``te.tags.packed_peer`` makes it. It is whom tags may be open for."""

    @property
    def rails(self) -> int:
        """Connections in use."""

    @property
    def death(self) -> tuple[int, int, str]:
        """Why it is not alive: code, errno, text."""

    def add_rail(self, fd: int, rings_fd: int) -> bool:
        """Takes over a connected, non-blocking socket, and on the same host a memory file of
        ``RINGS_NBYTES`` that cannot shrink; False (nothing taken) on a dead or full link.
        ``OSError`` (nothing taken)."""

    def die(self, code: int) -> None:
        """Asks the workers to close its rails."""

    def fence(self) -> None:
        """Marks it: nothing lands from it once ``quiesce`` has returned True."""

    def quiesce(self, timeout_s: float) -> bool:
        """Waits, without the lock, for landings of the link under way; False if one did not end."""

    @property
    def ended(self) -> bool:
        """Whether all its connections are closed: nothing lands from it any more. A link that is
        not alive may still be in the middle of a landing."""

    def add_mapping(self, serial: int, start: int, fd: int, nbytes: int) -> None:
        """Maps memory of the source, read-only, so that it is copied from directly. ``OSError``,
        also for a range that touches one which is mapped, and for too many."""

    def remove_mapping(self, serial: int) -> bool:
        """Unmaps it, if it is mapped; False when a copy out of it did not end: then it is no longer
        copied from, and is unmapped with the link. Waits without the lock."""

    def add_pair(
        self, endpoint: int, index: int, epoch: int, near_nic: int, far_nic: int, fences: int
    ) -> None:
        """Takes over a connected queue pair (``te.verbs``) as the rail ``index``; ``OSError``, and
        then it is not taken. A source's rail sends nothing before ``fences`` were heard of."""

    @property
    def fences(self) -> int:
        """How often a destination has broken all rails of the link."""

    def rail_flows(self, count: int) -> list[tuple[int, int, int, float]]:
        """For each of the first ``count`` rails over RDMA: bytes done and under way; and of the
        times that it was measured, always with work under way, the bytes done in them and their
        seconds."""

    def has_grant(self, revocation: Revocation) -> bool:
        """Whether its peer may still write over RDMA under the tag that was revoked."""

    def break_pairs(self, timeout_s: float) -> bool:
        """Ends what is under way over RDMA, without the lock: when it returns True, nothing that
        was sent before can land, or be read."""

    def submit(
        self,
        blocks: npt.NDArray[np.void],
        total: int,
        tag: int,
        kind: int,
        unfinished_max: int,
        pieces: bytes = b"",
        least: bytes = b"",
    ) -> TransferHandle | int | None:
        """Begins a transfer of blocks, shape (n,), dtype ``te.blocks.BLOCK``. Over RDMA, unless
        there are none, with the ``pieces`` for the rails, ``te.links.pieces.PIECE`` each, and for
        each rail how many of them another must have waiting ``least`` before it helps; 0 if it
        shall not carry any while another can.

        Instead of a handle: the index of the first block whose local side is not registered, or
        None when the link has ``unfinished_max`` unfinished transfers.
        """

class TransferHandle:
    @property
    def name(self) -> int:
        """What ``Engine.wait_notices`` calls it; unique while the handle lives."""

    def status(self) -> int: ...
    def failure(self) -> tuple[int, int, str]:
        """Why it failed: code, errno, text."""

    def cancel_requested(self) -> bool: ...
    def duration_s(self) -> float: ...
    def subscribe(self) -> bool:
        """True if there is an outcome; False if ``Engine.wait_notices`` will name it."""

    def cancel(self) -> bool:
        """Asks that it stop. For a read it waits, without the lock, for landings under way; False
        when one did not end in time. Always True for a write."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for an outcome, at first with the lock if it is small; False if none came."""
