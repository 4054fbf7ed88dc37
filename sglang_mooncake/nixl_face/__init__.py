# SPDX-License-Identifier: Apache-2.0
"""``nixl`` over te, for code that was written for NVIDIA's NIXL."""

from __future__ import annotations

from sglang_mooncake.nixl_face.finder import PACKAGES, install
from sglang_mooncake.nixl_face.opened import Notices, Options

__all__ = ["PACKAGES", "Notices", "Options", "install"]
