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
