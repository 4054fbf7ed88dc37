# SPDX-License-Identifier: Apache-2.0
"""How two engines find together: listening, dialling, greeting, and which transport it shall be.

It knows transports by their contract (``te.transports.base``) alone. What follows is the plane's.
"""

from __future__ import annotations
