# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`."""

from __future__ import annotations

import sys

from cpu_serving.demo import main

sys.exit(main(sys.argv[1:]))
