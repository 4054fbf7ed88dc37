# SPDX-License-Identifier: Apache-2.0
"""What stops the testbed before the command runs."""

from __future__ import annotations

__all__ = ["SetupError"]


class SetupError(Exception):
    """The testbed cannot run; the message says what to do."""
