# SPDX-License-Identifier: Apache-2.0
"""The transports that engines are tested over; that over RDMA needs the testbed."""

from __future__ import annotations

import pytest

import te.config

__all__ = ["TRANSPORTS"]

TRANSPORTS = [
    pytest.param(name, marks=pytest.mark.rdma if name == "rdma" else ())
    for name in te.config.TRANSPORTS
]
