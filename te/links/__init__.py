# SPDX-License-Identifier: Apache-2.0
"""How two engines find together: listening, dialling, greeting. What follows is the plane's."""

from __future__ import annotations
