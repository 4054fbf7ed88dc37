# SPDX-License-Identifier: Apache-2.0
"""Engines of one process, by memcpy: for tests, and as the smallest example of a transport."""

from __future__ import annotations
