# SPDX-License-Identifier: Apache-2.0
"""RDMA devices through libibverbs and librdmacm, opened at run time.

``abi.h`` (``abi.pxd`` for Cython) declares what is used of their binary interface, ``_core.pyx``
opens devices, registers memory and makes connected queue pairs, ``fabric.py`` is what an engine has
of them. The transport ``te/transports/rdma`` takes over each connected queue pair.
"""

from __future__ import annotations
