# SPDX-License-Identifier: Apache-2.0
"""Ways to move bytes; each folder holds one, behind the contract of ``base``."""

from __future__ import annotations
