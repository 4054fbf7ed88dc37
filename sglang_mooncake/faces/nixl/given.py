# SPDX-License-Identifier: Apache-2.0
"""Lists of descriptors, made of what callers have: tuples, arrays, tensors."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final, TypeVar

import numpy as np

from sglang_mooncake.faces.nixl.descriptors import RegDList, RemoteDList, XferDList
from sglang_mooncake.faces.nixl.names import Segment

__all__ = ["SEGMENTS", "list_of"]

logger = logging.getLogger(__name__)

SEGMENTS: Final = {
    "DRAM": Segment.DRAM_SEG,
    "VRAM": Segment.VRAM_SEG,
    "FILE": Segment.FILE_SEG,
    "BLOCK": Segment.BLK_SEG,
    "OBJ": Segment.OBJ_SEG,
    "cpu": Segment.DRAM_SEG,
    "cuda": Segment.VRAM_SEG,
}
"""By the names that ``mem_type`` may have."""

List = TypeVar("List", XferDList, RegDList, RemoteDList)


def list_of(
    kind: type[List], other: type, length: int, descs: Any, mem_type: str | None
) -> List | None:
    if isinstance(descs, kind):
        return descs
    if isinstance(descs, other):
        logger.error("nixl over te: %s was given, and %s is needed", other.__name__, kind.__name__)
        return None
    tensors = _tensors(descs)
    if tensors is not None:
        return _of_tensors(kind, tensors)
    is_array = isinstance(descs, np.ndarray)
    fits = is_array or (isinstance(descs[0], tuple) and len(descs[0]) == length)
    if is_array:
        fits = descs.ndim == 2 and descs.shape[1] == 3
    if mem_type is None or not fits:
        logger.error(
            "nixl over te: descriptors without tensors need a mem_type, and tuples of %d or an"
            " array of shape (n, 3)",
            length,
        )
        return None
    return kind(SEGMENTS[mem_type], descs)


def _tensors(descs: Any) -> list[Any] | None:
    """None if they are none. Nobody has a tensor who has not imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(descs, torch.Tensor):
        return [descs]
    is_list = isinstance(descs, list | tuple) and len(descs) > 0
    return list(descs) if is_list and isinstance(descs[0], torch.Tensor) else None


def _of_tensors(kind: type[List], tensors: list[Any]) -> List | None:
    """None unless all are contiguous and of one device."""
    device = tensors[0].get_device()
    if any(one.get_device() != device or not one.is_contiguous() for one in tensors):
        logger.error("nixl over te: tensors must be contiguous, and all of one device")
        return None
    segment = Segment.DRAM_SEG if device < 0 else Segment.VRAM_SEG
    rows = [(one.data_ptr(), one.numel() * one.element_size(), max(device, 0)) for one in tensors]
    return kind(segment, np.array(rows, np.uint64))
