# SPDX-License-Identifier: Apache-2.0
"""The data plane: compiled loops that move bytes without the interpreter, and what decides for
them.

``_core`` is compiled from ``_core.pyx`` and the ``.pxi`` files beside it, one per concern:
``structs`` (what there is), ``news`` (what Python is told), ``source`` and ``landing`` (the two
sides of a transfer), ``pull`` (same host), ``rails`` (one connection), ``worker`` (the threads) and
``handles`` (what Python holds). Over RDMA: ``posting`` and ``far`` (the source's side), ``marks``
and ``fences`` (the destination's), ``pairs`` (the life of a rail). It stands on the modules of
``te.core``, of which ``wire.h`` has the format of the frames; ``wire.pxi`` and ``wire`` show it to
Python. ``reasons`` makes sentences of the plane's codes.
"""

from __future__ import annotations
