# SPDX-License-Identifier: Apache-2.0
"""Between processes of one host: the destination copies out of the source's memory.

``reach`` finds out whether that can be, ``process`` is who the other process is and may read here,
``sharing`` which memory peers have mapped, ``messages`` what the two sides say, ``transport`` the
contract.
"""

from __future__ import annotations
