# SPDX-License-Identifier: Apache-2.0
"""How a rank's part of the store is seen: its metrics in SGLang's own `/metrics`, beside those of
the hand-over, and its name in `te top` and `kvstore top`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from sglang.srt.runtime_context import (
    get_disagg,
    get_observability,
    get_parallel,
    get_serving,
)

from kvstore.client.status import StoreStatus
from kvstore.metrics.table import METRICS, PREFIX, counters, gauges
from sglang_mooncake.context import engine_label
from sglang_mooncake.metrics import Key, Metric
from sglang_mooncake.sglang.prometheus import Exporter

__all__ = ["open_exporter", "store_label"]

_TABLE: Final = tuple(Metric(*one) for one in METRICS)


class _StoreFigures:
    def __init__(self, status: Callable[[], StoreStatus]) -> None:
        self._status = status

    def values(self) -> tuple[Mapping[Key, float], Mapping[Key, float]]:
        status = self._status()
        return counters(status), gauges(status)

    def observations(self) -> Iterator[tuple[Key, float]]:
        return iter(())


def open_exporter(status: Callable[[], StoreStatus], registry: Any = None) -> Exporter | None:
    """Tells Prometheus how this rank's part of the store is; None where the server was started
    without --enable-metrics.

    Args:
        status: ``Store.figures``.
        registry: see ``Exporter``.
    """
    if not get_observability().enable_metrics:
        return None
    return Exporter(_TABLE, _StoreFigures(status), _labels(), PREFIX, registry)


def store_label() -> str:
    """What `te top` and `kvstore top` call this rank's part of the store."""
    serving, labels = get_serving(), _labels()
    role = {"null": "server"}.get(labels["role"], labels["role"])
    place = " ".join(f"{axis} {labels[f'{axis}_rank']}" for axis in ("dp", "cp", "tp", "pp"))
    return engine_label(f"store of {role} ({place})", labels["model_name"], int(serving.port))


def _labels() -> dict[str, str]:
    """As `seam.metric_labels` has them; the role of an ordinary server is "null", as SGLang calls
    it."""
    parallel = get_parallel()
    dp = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else parallel.dp_rank or 0
    return {
        "model_name": str(get_serving().served_model_name),
        "role": str(get_disagg().disaggregation_mode),
        "dp_rank": str(dp),
        "cp_rank": str(parallel.attn_cp_rank),
        "tp_rank": str(parallel.attn_tp_rank),
        "pp_rank": str(parallel.pp_rank),
    }
