# SPDX-License-Identifier: Apache-2.0
"""The data plane, compiled: modules of one noun each, with their contracts in ``.pxd`` files. They
form layers, each of which knows those before it alone; ``docs/architecture.md`` names them in their
order. ``engine`` and ``handles`` are what Python has of it.
"""

from __future__ import annotations
