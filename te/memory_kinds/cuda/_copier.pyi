# SPDX-License-Identifier: Apache-2.0
from te.memory_kinds.cuda._driver import Driver

class Copier:
    """Copies between the memory of one GPU and host memory: ``compiled`` for te's workers, the rest
    for who registers memory. It keeps the GPU's primary context, as PyTorch does."""

    compiled: object
    """The capsule of the kind; it keeps what it needs of the copier."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """``OSError`` with the driver's own error: without memory for streams, for example."""

    def mapped_until(self, address: int, end: int) -> int:
        """Up to which address [address, end) is memory of GPUs; ``end`` if it all is."""

    def block(self, address: int) -> tuple[bytes, int, int]:
        """The block of ``cuMemAlloc`` that has the address: its handle for other processes, where
        it begins, and its size in bytes. ``OSError``."""

    def piece(self, address: int) -> tuple[int, int, int]:
        """The piece of virtual memory that is mapped there: a descriptor, which is the caller's,
        and the same. ``OSError`` also if it was made without one."""

    def open_block(self, handle: bytes, nbytes: int) -> tuple[int, int, int]:
        """Another process's block, of so many bytes at least: its address here, a number for
        ``unmap``, and its size in bytes. ``OSError``, ``ValueError``."""

    def map_pieces(self, fds: list[int], sizes: list[int]) -> tuple[int, int]:
        """Another process's pieces, side by side; address and number. The descriptors stay the
        caller's."""

    def unmap(self, number: int) -> None:
        """What ``open_block`` or ``map_pieces`` has mapped. It may wait for the GPU."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Host memory for copies; False if somebody has pinned it already. ``OSError``."""

    def unpin(self, address: int) -> None:
        """What ``pin`` has pinned. ``OSError``."""

    @property
    def trouble(self) -> str:
        """Of the last copy that failed: ``"cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"``."""

def is_in_use(driver: Driver, ordinal: int) -> bool:
    """Whether the process has the GPU's primary context; to make it takes hundreds of MB there."""
