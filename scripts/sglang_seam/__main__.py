# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_seam KNOWN NEW``: folders of two releases. Prints what differs.

Exit status 1 if the new one lacks something."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_seam.release import Release, changes
from sglang_seam.uses import uses

OURS = Path(__file__).parents[2] / "sglang_mooncake/sglang"


def main(arguments: Sequence[str]) -> int:
    known, new = (Release(Path(one)) for one in arguments)
    used = uses(path.read_text() for path in sorted(OURS.rglob("*.py")))
    lines = list(changes(known, new, used))
    for line in lines:
        print(f"  {line}")
    lacking = sum(not line.endswith("reads otherwise") for line in lines)
    print(f"{len(used)} uses of SGLang: {lacking} lacking, {len(lines) - lacking} read otherwise")
    return min(lacking, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
