# SPDX-License-Identifier: Apache-2.0
def frame_rules() -> list[
    tuple[int, str, str, int, int, int, bool, str, list[tuple[int, int, int, str]]]
]:
    """The table of ``wire.h``; ``scripts/wire_spec/table.py`` gives its parts names."""

def frame_layouts() -> list[tuple[str, int, list[tuple[str, int, int, int, str]]]]:
    """The structs of ``wire.h``, the header first: name, bytes, and for each member its name,
    offset, bytes, length of the array, meaning."""

def frame_limits() -> dict[str, int]:
    """The numbers of ``wire.h`` by their names."""

def check_frame(header: bytes, over: int, from_source: bool) -> int | str:
    """What the plane makes of a header that came over a link: how many bytes of items follow, or
    what is wrong with it. ``over`` is an ``Over`` of ``scripts/wire_spec/table.py``. ``ValueError``
    if these are not the bytes of one header."""

def ring_limits() -> dict[str, int]:
    """Sizes of rings and of their heads in bytes, by name."""

def ring_layout() -> dict[str, int]:
    """Offsets in the head of a ring, by name."""

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
