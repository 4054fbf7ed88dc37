# SPDX-License-Identifier: Apache-2.0
from typing import Final

SLOTS_MAX: Final[int]
"""Of one staging."""
