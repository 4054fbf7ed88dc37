# SPDX-License-Identifier: Apache-2.0
"""Which transports are possible on this machine, and why not: one sentence each, with the fix.

``facts`` looks at the machine, ``rules`` judges what was found (pure), ``report`` is ``te doctor``.
"""

from __future__ import annotations

from te.doctor.facts import Facts, Port, gather
from te.doctor.report import explain
from te.doctor.rules import Finding, findings

__all__ = ["Facts", "Finding", "Port", "explain", "findings", "gather"]
