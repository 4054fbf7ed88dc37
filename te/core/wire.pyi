# SPDX-License-Identifier: Apache-2.0
from typing import Final

FRAME_BLOCKS_MAX: Final[int]
RAILS_LIMIT: Final[int]
NICS_LIMIT: Final[int]
PIECES_LIMIT: Final[int]
RECEIVE_DEPTH: Final[int]
RANGES_LIMIT: Final[int]
NOTE_LIMIT: Final[int]
MAY_READ: Final[int]
MAY_WRITE_TAGGED: Final[int]
MAY_WRITE_UNTAGGED: Final[int]
