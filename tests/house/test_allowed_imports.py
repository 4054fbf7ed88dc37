# SPDX-License-Identifier: Apache-2.0
"""What each part may import from elsewhere: a list of what is allowed, so that what nobody has
thought of is refused. Which module of ours knows which: pyproject.toml (import-linter)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Folder → what its modules import beside Python's own; the deepest folder of a module counts.
ALLOWED = {
    "te": {"msgspec", "numpy"},
    "bootstrap_server": {"aiohttp", "msgspec", "uvloop"},
    "sglang_mooncake": {"bootstrap_server", "msgspec", "numpy", "te", "zmq"},
    "sglang_mooncake/sglang": {"bootstrap_server", "msgspec", "numpy", "sglang", "te", "torch"},
}


def imports(path: Path) -> set[str]:
    """The packages that a module names, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.Import(names=names):
                found |= {one.name.partition(".")[0] for one in names}
    return found - set(sys.stdlib_module_names)


def allowed(module: str) -> set[str]:
    folder = max((one for one in ALLOWED if module.startswith(f"{one}/")), key=len)
    return ALLOWED[folder] | {folder.partition("/")[0]}


@pytest.mark.parametrize("package", ["te", "bootstrap_server", "sglang_mooncake"])
def test_modules_import_what_their_folder_may(package: str) -> None:
    found = {
        module: sorted(more)
        for path in (ROOT / package).rglob("*.py")
        if (more := imports(path) - allowed(module := path.relative_to(ROOT).as_posix()))
    }
    assert not found, "imports that are not allowed there (ALLOWED in this file)"
