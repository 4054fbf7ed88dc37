# SPDX-License-Identifier: Apache-2.0
"""Another release of vLLM over the compiled modules of the installed one. `scripts/setup` calls it
with the folder of a wheel, which it removes, and the folder that becomes the overlay."""

from __future__ import annotations

import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def main(wheels: Path, overlay: Path) -> None:
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(overlay, [one for one in archive.namelist() if not one.endswith(".so")])
    shutil.rmtree(wheels)
    found = find_spec("vllm")
    assert found is not None, "scripts/setup vllm comes first"
    assert found.origin is not None
    installed = Path(found.origin).parent
    for module in installed.rglob("*.so"):
        shutil.copy(module, overlay / "vllm" / module.relative_to(installed))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
