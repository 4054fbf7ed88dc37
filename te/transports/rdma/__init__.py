# SPDX-License-Identifier: Apache-2.0
"""Bytes by RDMA devices: a link has one connection for words, and queue pairs for rails.

``direct`` makes both ends of a rail, with ``cm`` where those are connected by rdma_cm; ``link``
has that done for the rails that the link's worker asks for, which keeps them by the rules of
``rails``; ``devices`` hears what devices tell. ``striping`` says which devices make rails;
``pieces`` and ``balance``, compiled, how a transfer is cut, and which rail carries the next piece.
``messages`` is what the two sides say, ``transport`` the contract.
"""

from __future__ import annotations
