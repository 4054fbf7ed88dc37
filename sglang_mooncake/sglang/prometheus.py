# SPDX-License-Identifier: Apache-2.0
"""A rank's metrics in SGLang's own `/metrics`.

SGLang runs prometheus_client in its multi-process mode: each process writes its values to files,
and the HTTP server adds them up. So scheduler processes need objects of prometheus_client alone,
made after SGLang has set PROMETHEUS_MULTIPROC_DIR, which it has before it makes a KV manager or a
prefix cache.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from sglang_mooncake.metrics import (
    BUILD,
    PREFIX,
    RANK_LABELS,
    Deltas,
    Key,
    Metric,
    gauges,
    observations,
    totals,
)
from sglang_mooncake.stats import Recorder
from sglang_mooncake.story import RoomStory
from te.stats import Stats
from te.version import version

__all__ = ["Exporter", "Figures", "HandoverFigures"]

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 1.0
#: Rooms that end within an interval; the stages of further ones are not told.
_STORIES_MAX: Final = 16_384


class Figures(Protocol):
    """What a rank tells. The exporter's thread alone calls it."""

    def values(self) -> tuple[Mapping[Key, float], Mapping[Key, float]]:
        """Counters, which only rise, and gauges, of one moment."""

    def observations(self) -> Iterator[tuple[Key, float]]:
        """What histograms have to see since the last call."""


class HandoverFigures:
    """Those of the hand-over."""

    def __init__(self, recorder: Recorder, stats: Callable[[], Stats]) -> None:
        self._recorder, self._stats = recorder, stats
        self._stories: deque[RoomStory] = deque(maxlen=_STORIES_MAX)
        recorder.on_room_over(self._stories.append)

    def values(self) -> tuple[Mapping[Key, float], Mapping[Key, float]]:
        stats, refused = self._stats(), self._recorder.refused
        whys = None if refused is None else [one.why for one in refused()]
        return (
            totals(stats, self._recorder.totals()),
            gauges(stats, self._recorder.rooms()["open"], whys),
        )

    def observations(self) -> Iterator[tuple[Key, float]]:
        while self._stories:
            yield from observations(self._stories.popleft())


class Exporter:
    """Tells Prometheus, once a second and from a thread of its own, what has been counted since:
    neither the scheduler's thread nor the loop's calls prometheus_client.

    Args:
        metrics: the table of which `figures` gives values.
        rank: the values of `RANK_LABELS`.
        prefix: of the metrics' names.
        registry: a `prometheus_client.CollectorRegistry` (default: the process's).
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        figures: Figures,
        rank: Mapping[str, str],
        prefix: str = PREFIX,
        registry: Any = None,
    ) -> None:
        self._figures = figures
        self._rank = tuple(rank[name] for name in RANK_LABELS)
        self._made = {one.name: _made(one, prefix, registry) for one in metrics}
        self._build, self._version = _made(BUILD, PREFIX, registry), version()
        self._deltas = Deltas()
        self._told = set[Key]()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells what is left. Idempotent."""
        self._ending.set()
        self._thread.join(5 * _INTERVAL_S)

    def _run(self) -> None:
        while not self._ending.wait(_INTERVAL_S):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        try:
            risen, now = self._figures.values()
            for key, by in self._deltas.of(risen).items():
                self._child(key).inc(by)
            for key in self._told - now.keys():
                self._child(key).set(0)  # Another rank tells it now.
            for key, value in now.items():
                self._child(key).set(value)
            self._told |= now.keys()
            for key, value in self._figures.observations():
                self._child(key).observe(value)
            self._build.labels(*self._rank, self._version).set(1)
        except Exception:  # such as a full disk below the files of prometheus_client
            logger.exception("cannot update the metrics of this rank; the next attempt is in 1 s")

    def _child(self, key: Key) -> Any:
        name, own = key
        return self._made[name].labels(*self._rank, *own)


def _made(one: Metric, prefix: str, registry: Any) -> Any:
    """The object of prometheus_client. One process makes it once: a role switch makes a second
    manager, which goes on with the same."""
    # Late: prometheus_client looks at its first import whether it runs in multi-process mode.
    import prometheus_client

    registry = prometheus_client.REGISTRY if registry is None else registry
    name = prefix + one.name
    if (registry, name) not in _MADE:
        arguments: dict[str, Any] = {"registry": registry}
        if one.kind == "histogram":
            arguments["buckets"] = one.buckets
        if one.kind == "gauge":
            # Each rank has labels of its own; a dead process's values go with it.
            arguments["multiprocess_mode"] = "livemostrecent"
        kind = getattr(prometheus_client, one.kind.capitalize())
        _MADE[registry, name] = kind(name, one.help, (*RANK_LABELS, *one.labels), **arguments)
    return _MADE[registry, name]


_MADE: dict[tuple[Any, str], Any] = {}
