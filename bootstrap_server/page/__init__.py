# SPDX-License-Identifier: Apache-2.0
"""The status page as the browser gets it: one document with its style and script, nothing from
elsewhere, and a policy by which the browser loads and runs nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
from pathlib import Path
from typing import Final

from aiohttp import web

__all__ = ["PAGE", "Page"]

_FOLDER: Final = Path(__file__).parent
#: In this order they are one script.
_SCRIPTS: Final = ("model.js", "tables.js", "matrix.js", "main.js")


class Page:
    """Made of the files of this folder once."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        style = _read(folder, "page.css")
        script = '"use strict";\n' + "\n".join(_read(folder, name) for name in _SCRIPTS)
        document = _read(folder, "page.html")
        self.text = document.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
        self._plain = self.text.encode()
        self._gzipped = gzip.compress(self._plain)
        self._headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
                "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                "frame-ancestors 'none'; require-trusted-types-for 'script'"
            ),
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }

    def response(self, request: web.Request) -> web.Response:
        """The answer to a request for the page."""
        takes_gzip = "gzip" in request.headers.get("Accept-Encoding", "")
        response = web.Response(
            body=self._gzipped if takes_gzip else self._plain,
            content_type="text/html",
            charset="utf-8",
            headers=self._headers,
        )
        if takes_gzip:
            response.headers["Content-Encoding"] = "gzip"
        return response


def _read(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As Content-Security-Policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE: Final = Page()
