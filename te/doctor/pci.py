# SPDX-License-Identifier: Apache-2.0
"""PCI Express capabilities in a device's configuration space. Pure.

Source: PCI Express Base Specification, 7.7 (extended capabilities, Access Control Services).
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["acs_redirects"]

_LEGACY_BYTES: Final = 0x100
_SPACE_BYTES: Final = 0x1000
_ACS: Final = 0x000D
_CONTROL: Final = 6
#: Request redirect, completion redirect, upstream forwarding.
_REDIRECTS: Final = 0b1_1100


def acs_redirects(config: bytes) -> bool | None:
    """Whether a bridge sends traffic between devices below it up to the processor.

    Args:
        config: its configuration space, as in ``/sys/bus/pci/devices/*/config``.

    Returns:
        None if that is not known: processes without CAP_SYS_ADMIN are shown the first 64 bytes
        only. False for a bridge without Access Control Services.
    """
    if len(config) < _LEGACY_BYTES + 4:
        return None
    offset, seen = _LEGACY_BYTES, set[int]()
    while offset >= _LEGACY_BYTES and offset not in seen:
        if offset + 8 > min(len(config), _SPACE_BYTES):
            return None
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, offset + _CONTROL)
            return bool(control & _REDIRECTS)
        offset = header >> 20 & ~3
    return False
