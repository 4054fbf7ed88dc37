# SPDX-License-Identifier: Apache-2.0
def has_libcrypto() -> bool:
    """Whether OpenSSL's libcrypto is there, so that this process can encrypt."""

class Records:
    """Encrypted records (encryption.pxd has the format) over ``fd``, one end of a socket that is
    not the plane's. ``out``, ``into``: the secrets of what goes out and of what comes in.
    ``OSError``."""

    def __init__(self, fd: int, out: bytes, into: bytes, rekey_records: int = 0) -> None: ...
    @property
    def ready(self) -> bool:
        """Whether there is more to receive than the socket shows."""

    def send(self, data: bytes, own: bool = True) -> int:
        """How many bytes were sent; of the others the next call must offer the same again."""

    def receive(self, room: bytearray, own: bool = True) -> int:
        """How many bytes were put into ``room``; 0 at the end of the stream."""
