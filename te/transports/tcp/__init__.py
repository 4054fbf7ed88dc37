# SPDX-License-Identifier: Apache-2.0
"""Writes over TCP connections, straight from and into registered memory.

``wire`` is the format, ``segments`` cuts transfers, ``connect`` opens connections, ``sender`` and
``incoming``/``receiver`` are the two sides, ``loop`` their thread, ``syscalls`` what they call.
"""

from __future__ import annotations

from te.transports.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
