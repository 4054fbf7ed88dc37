# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine.TransferEngine`` over te, for code that was written for Mooncake's engine."""

from __future__ import annotations

from sglang_mooncake.mooncake_face.engine import Options, TransferEngine
from sglang_mooncake.mooncake_face.finder import install

__all__ = ["Options", "TransferEngine", "install"]
