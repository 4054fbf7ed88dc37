# SPDX-License-Identifier: Apache-2.0
"""Bytes through TCP connections, each of which is a rail: works everywhere."""

from __future__ import annotations
