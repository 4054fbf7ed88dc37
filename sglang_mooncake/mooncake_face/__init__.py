# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine.TransferEngine`` over te, for code that was written for Mooncake's engine."""

from __future__ import annotations

from sglang_mooncake.mooncake_face.engine import TransferEngine
from sglang_mooncake.mooncake_face.finder import install
from sglang_mooncake.mooncake_face.opened import Options

__all__ = ["Options", "TransferEngine", "install"]
