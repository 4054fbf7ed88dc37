# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a machine for transfers, by name: what, what that costs, what mends it.

``facts`` looks at the machine; ``rules`` and ``host_rules`` judge what was found (pure);
``catalogue`` has the text of every finding; ``command`` is ``te doctor``; ``startup`` is
what a process that starts an engine asks.
"""

from __future__ import annotations

from te.doctor.facts import Facts, Port, gather
from te.doctor.findings import Finding, Severity
from te.doctor.rules import findings
from te.doctor.startup import verdict

__all__ = ["Facts", "Finding", "Port", "Severity", "findings", "gather", "verdict"]
