# SPDX-License-Identifier: Apache-2.0
"""See `healing_run.command`."""

from __future__ import annotations

import sys

from healing_run.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
