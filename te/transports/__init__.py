# SPDX-License-Identifier: Apache-2.0
"""Ways from one engine to another, a folder each, behind one contract.

``base`` is the contract of their Python half, ``registry`` lists them. A folder has everything that
is particular to its transport: nothing outside asks for a transport's name.
"""

from __future__ import annotations
