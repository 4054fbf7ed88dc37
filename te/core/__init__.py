# SPDX-License-Identifier: Apache-2.0
"""What the data plane stands on, compiled: modules of one noun each, with their contracts in `.pxd`
files. They form layers, each of which knows those before it alone: ``sync`` (atomics, the clock,
futexes) and ``posix`` (calls to the kernel), ``heap``, ``wire`` (the format of the frames),
``maps``, ``vectors`` (arrays of iovecs), ``channels`` (a socket, or rings in shared memory),
``sections`` (what a worker is writing just now), ``regions`` (the memory that peers may name),
``tags`` (the rights to write it), ``kinds`` (who can touch memory of a kind, and how it is copied),
``staging`` (slots of host memory between that and a byte channel).
"""

from __future__ import annotations
