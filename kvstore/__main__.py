# SPDX-License-Identifier: Apache-2.0
"""``python -m kvstore``."""

import sys

from kvstore.cli import main

sys.exit(main())
