# SPDX-License-Identifier: Apache-2.0
"""What the module ``mooncake.engine`` holds beside the class, and why it lacks the rest."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from sglang_mooncake.faces.finder import lacking

__all__ = ["CONTENTS", "TransferNotify", "TransferOpcode"]


class TransferOpcode(enum.IntEnum):
    """The direction of a transfer."""

    Read = 0
    Write = 1


@dataclass
class TransferNotify:
    """A message that goes with a transfer."""

    name: str = ""
    msg: str = ""


SUPPORTS: Final = ("CUDA", "EFA", "HIP", "MNNVL", "MUSA", "INTRA_NVLINK")
"""Programs ask the module for these before they call methods that belong to a build of Mooncake's,
such as ``transfer_write_on_cuda``. The engine over te has none of those methods; it moves CUDA
memory without them."""
_STORE: Final = "Mooncake's store and Mooncake's EP alone use it"
_MESSAGES: Final = "it sends Python's messages and tensors by itself, without a transfer engine"
_LACKS: Final[dict[str, str]] = {
    "InnerTransferEngine": _STORE,
    "SharedSegment": "it shares memory between processes without a transfer engine",
    "RpcInterface": _MESSAGES,
    "CoroRPCInterface": _MESSAGES,
    "ReceivedData": _MESSAGES,
    "ReceivedTensor": _MESSAGES,
    "create_rpc_client": _MESSAGES,
    "create_rpc_server": _MESSAGES,
}
CONTENTS: Final[dict[str, object]] = {
    "TransferOpcode": TransferOpcode,
    "Read": TransferOpcode.Read,
    "Write": TransferOpcode.Write,
    "TransferNotify": TransferNotify,
    "__getattr__": lacking("mooncake.engine over te", "mooncake", _LACKS),
    **{f"SUPPORT_{name}": False for name in SUPPORTS},
}
