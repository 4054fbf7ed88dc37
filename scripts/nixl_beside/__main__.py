# SPDX-License-Identifier: Apache-2.0
"""See `nixl_beside.command`."""

from __future__ import annotations

import sys

from nixl_beside.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
