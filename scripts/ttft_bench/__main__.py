# SPDX-License-Identifier: Apache-2.0
"""`scripts/ttft`."""

from __future__ import annotations

import sys

from ttft_bench.command import main

sys.exit(main(sys.argv[1:]))
