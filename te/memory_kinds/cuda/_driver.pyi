# SPDX-License-Identifier: Apache-2.0
class Driver:
    """The CUDA driver of this process. Any thread may call anything; nothing waits for a GPU."""

    def ordinal_of(self, address: int) -> int | None:
        """CUDA's number, in this process, of the GPU whose memory it is; None for any other memory,
        also for managed memory, which the processor and the kernel reach, too."""

    def pci_address(self, ordinal: int) -> str:
        """Of the GPU, as sysfs writes it (``0000:1b:00.0``); empty if the driver does not tell."""

    def shows_writes(self, ordinal: int) -> bool:
        """Whether kernels that are launched after a NIC's completion see what it has written to the
        GPU; else it has to be flushed (cuFlushGPUDirectRDMAWrites)."""

    def flushes_writes(self, ordinal: int) -> bool:
        """Whether that call does it."""

    def dma_buf(self, address: int, nbytes: int) -> int:
        """A descriptor, which is the caller's. ``OSError`` with the driver's own error."""

def find() -> Driver | None:
    """The driver, if the process has loaded it, as anybody has who owns such memory; te never loads
    it. ``RuntimeError`` if it is too old."""
