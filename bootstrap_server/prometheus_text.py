# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, for the registry and for `kvstore serve`. Pure.

SGLang brings Prometheus' own package, prometheus_client, and we do not use it here. It decides at
its first import whether it works in the multi-process mode that SGLang's metrics need. SGLang loads
plugins, ours among them, before it has set that mode up. And the package would save nothing: a
metric takes as many lines as an object of the package as it does as text, and to import the
package takes 60 ms and 12 MB. What a rank tells goes through SGLang's own `/metrics`, with
prometheus_client (`sglang_mooncake/sglang/prometheus.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

__all__ = ["CONTENT_TYPE", "family"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def family(
    name: str,
    kind: str,
    what: str,
    labels: Iterable[str],
    values: Mapping[tuple[str, ...], float],
) -> Iterator[str]:
    """The lines of one metric, without newlines.

    Args:
        kind: "counter" or "gauge".
        what: its help.
        labels: the names of its labels.
        values: by the values of its labels, of which there are as many.
    """
    names = tuple(labels)
    yield f"# HELP {name} {what.translate(_HELP_ESCAPED)}"
    yield f"# TYPE {name} {kind}"
    for given, value in values.items():
        pairs = ",".join(
            f'{label}="{one.translate(_ESCAPED)}"' for label, one in zip(names, given, strict=True)
        )
        yield f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"
