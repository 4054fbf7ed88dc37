# SPDX-License-Identifier: Apache-2.0
def load() -> None:
    """Opens libibverbs; ``OSError`` that says what is missing."""

def device_list() -> list[tuple[str, bool]]:
    """(name, is it of the iWARP family) of each device; ``OSError``."""

class Device:
    """An open device with a protection domain. Every ``OSError`` names the verb that failed."""

    name: str
    is_iwarp: bool

    def __init__(self, name: str) -> None: ...
    def close(self) -> None:
        """Nothing is made of it any more (``OSError``); it is closed as soon as its queue pairs and
        memory regions have gone. Idempotent."""

    @property
    def limits(self) -> tuple[int, int, int, int, int]:
        """max_mr_size, max_qp_wr, max_cqe, max_mr, ports; ibv_query_device(3)."""

    @property
    def events_fd(self) -> int:
        """Readable when ``events`` has some."""

    def events(self) -> list[tuple[int, int]]:
        """(``enum ibv_event_type``, port, or 0 where it is about none) of each event that waits. An
        error of a queue pair is also set in its ``Endpoint``, for the data plane. Of the iWARP
        family only events of the device and its ports come here."""

    def port(self, number: int) -> tuple[int, int, int, bool, int, int]:
        """State (4 is active), active MTU as its enum, LID, whether it is Ethernet, partition keys,
        longest message in bytes; ibv_query_port(3)."""

    def gids(self) -> list[tuple[int, int, bytes, int, int]]:
        """(port, index, GID as 16 bytes, 0 InfiniBand or 1 or 2 for RoCE, number of the interface)
        of each valid entry, in one call: files in sysfs take 10 ms for each of up to 1024."""

    def register(
        self, address: int, nbytes: int, relaxed: bool, remote_read: bool, remote_write: bool
    ) -> MemoryRegion:
        """ibv_reg_mr(3), for this side and, as told, for peers that have its rkey; with relaxed
        ordering if asked and the library has it. Also of CUDA memory, if the peer-memory module is
        loaded."""

    def register_dma_buf(
        self,
        fd: int,
        offset: int,
        address: int,
        nbytes: int,
        remote_read: bool,
        remote_write: bool,
    ) -> MemoryRegion:
        """ibv_reg_dmabuf_mr(3): memory of another device, which lies at ``offset`` of the file and
        is called by ``address``; the same, with relaxed ordering. The file is not needed
        afterwards."""

    def queue_pair(
        self, port: int, send_depth: int, receive_depth: int, message_bytes: int
    ) -> QueuePair:
        """With a completion queue and channel of its own; not connected yet. Nobody gives it
        messages of more than ``message_bytes``."""

    def dial(
        self,
        local: bytes,
        remote: bytes,
        remote_port: int,
        token: bytes,
        send_depth: int,
        message_bytes: int,
        timeout_s: float,
    ) -> tuple[QueuePair, bytes]:
        """A connected QueuePair, by rdma_cm(7), and what the other side said with its answer.

        ``local`` and ``remote``: 16 bytes, of an IPv6 address or of an IPv4 address mapped to one.
        ``token``: at most 64 bytes, for the ``CmRequest``. A device may block in here for longer
        than ``timeout_s``, but never succeeds after it. ``OSError``."""

class MemoryRegion:
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    def close(self) -> None:
        """After it returns nothing can land through its keys. Idempotent; ``OSError``."""

class QueuePair:
    """Destroyed with its last reference, unless it was disowned."""

    @property
    def number(self) -> int: ...
    @property
    def address(self) -> int:
        """Of the ``Endpoint`` of ``abi.h``."""

    def disown(self) -> None:
        """Somebody else releases the endpoint from now on. The device must outlive it."""

    def connect(
        self,
        remote_number: int,
        remote_psn: int,
        local_psn: int,
        remote_gid: bytes,
        gid_index: int,
        remote_lid: int,
        mtu: int,
        timeout: int,
        retries: int,
        traffic_class: int,
        service_level: int,
        partition_key_index: int,
        is_target: bool,
    ) -> None:
        """To the ready-to-send state; ibv_modify_qp(3). ``remote_gid`` is empty within an
        InfiniBand subnet. Through one that is no target the other side can neither read nor
        write, whatever keys it has. ``OSError``."""

class CmListener:
    """Takes connections by rdma_cm(7) at one address of this host, 16 bytes as in ``dial``."""

    def __init__(self, address: bytes, port: int) -> None:
        """``port``: 0 for one that the kernel chooses. ``OSError``."""

    @property
    def fd(self) -> int:
        """Readable when ``requests`` has some."""

    @property
    def port(self) -> int:
        """Where it listens."""

    def requests(self) -> list[CmRequest]:
        """Those that wait."""

class CmRequest:
    """Somebody dials. Rejected with its last reference, unless a queue pair was made of it."""

    @property
    def token(self) -> bytes:
        """What the other side gave to ``Device.dial``."""

    def queue_pair(self, device: Device, receive_depth: int, message_bytes: int) -> QueuePair:
        """Once, for the device that has the address; the data plane accepts it as soon as it has
        posted receives. ``OSError``."""
