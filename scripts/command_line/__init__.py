# SPDX-License-Identifier: Apache-2.0
"""How scripts that are written in Python read their arguments. Standard library alone: ``--help``
and a wrong argument are answered before anything is set up."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """A wrong argument is answered with one sentence and exit status 2.

    prog: how the script is called, such as ``.venv/bin/python scripts/wire_doc.py``.
    """

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **settings)
        self._name = prog.rpartition("/")[2].split()[0]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self._name}: {message} (--help lists the options)\n")
