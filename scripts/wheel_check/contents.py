# SPDX-License-Identifier: Apache-2.0
"""Whether sdists and wheels hold what they must, and nothing else.

Prints a sentence for each problem; the exit status is 1 if there is one.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

PACKAGES = ("te", "bootstrap_server", "kvstore", "sglang_mooncake")
TYPED = frozenset(f"{one}/py.typed" for one in PACKAGES)
#: What every package of ours is made of; the files of the registry's page among it.
OURS = r"(te|bootstrap_server|kvstore|sglang_mooncake)/([\w/]+)?"
IN_WHEEL = re.compile(
    rf"{OURS}(\w+\.(py|pyi)|\w+\.[\w-]+\.so|py\.typed)"
    r"|bootstrap_server/page/\w+\.(js|css|html)"
    r"|sglang_mooncake-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|(entry_points|top_level|sboms/.*)"
    r"(\.txt)?|licenses/LICENSE)"
)
IN_SDIST = re.compile(
    rf"{OURS}(\w+\.(py|pyi|pyx|pxd|pxi|h)|py\.typed)"
    r"|bootstrap_server/page/\w+\.(js|css|html)"
    r"|sglang_mooncake\.egg-info/\w+(-INFO)?(\.txt)?"
    r"|LICENSE|MANIFEST\.in|PKG-INFO|README\.md|pyproject\.toml|setup\.py|setup\.cfg"
)
WHEEL_NEEDS = TYPED | {"te/core/engine.pyi"}
SDIST_NEEDS = TYPED | {"LICENSE", "pyproject.toml", "setup.py", "te/core/engine.pyx"}


def problems(names: Iterable[str], *, wheel: bool) -> list[str]:
    """What is wrong with a wheel or an sdist of these files, a sentence for each.

    `names` are paths inside the archive, for an sdist below its one directory.
    """
    files = {name for name in names if name and not name.endswith("/")}
    allowed, needed = (IN_WHEEL, WHEEL_NEEDS) if wheel else (IN_SDIST, SDIST_NEEDS)
    found = [f"{name} is missing" for name in sorted(needed - files)]
    found += [
        f"{name} does not belong into it" for name in sorted(files) if not allowed.fullmatch(name)
    ]
    if wheel and not any(name.startswith("te/core/engine.") and ".so" in name for name in files):
        found.append("te/core/engine is not compiled")
    if wheel and not any(name.endswith("/licenses/LICENSE") for name in files):
        found.append("the licence is missing")
    return found


def names_in(archive: Path) -> list[str]:
    """The files of a wheel; those of an sdist without its one directory.

    Raises:
        ValueError: it is neither.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as sdist:
            members = [one for one in sdist.getmembers() if not one.isdir()]
            return [one.name.partition("/")[2] for one in members]
    raise ValueError(f"{archive.name} is neither a wheel (.whl) nor an sdist (.tar.gz)")


def main(arguments: Sequence[str]) -> int:
    status = 0
    for path in map(Path, arguments):
        for problem in problems(names_in(path), wheel=path.suffix == ".whl"):
            print(f"{path.name}: {problem}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
