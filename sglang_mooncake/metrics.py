# SPDX-License-Identifier: Apache-2.0
"""What one rank tells a monitoring system: the table of metrics, and how their values follow from
what the engine and the recorder count. Pure; `sglang/prometheus.py` hands it to Prometheus.

Every metric carries the labels of its rank as well (`RANK_LABELS`). Values of labels come from
code, never from a peer, a request or a sentence, so that their number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from bootstrap_server import Why, build
from sglang_mooncake.rooms.states import ENDS
from sglang_mooncake.stats import COMPARED
from sglang_mooncake.story import RoomStory
from te.reasons import Reason
from te.stats import Stats

__all__ = [
    "BUILD",
    "METRICS",
    "PREFIX",
    "RANK_LABELS",
    "Deltas",
    "Key",
    "Metric",
    "gauges",
    "observations",
    "totals",
]

PREFIX: Final = "sglang_mooncake_"
RANK_LABELS: Final = ("model_name", "role", "dp_rank", "cp_rank", "tp_rank", "pp_rank")
#: Hand-overs take 1.4 ms between two idle ranks of one host, and minutes where a GPU is short.
_SECONDS: Final = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
#: Why transfers fail and links end, as far as that is the same over all transports.
_WHY: Final = tuple(one.name.lower() for one in Reason if one is not Reason.NO_REASON)
_OUTCOMES: Final = ("done", "failed", "cancelled", "landed")
#: Reasons of fall-backs that are told apart; further ones count as "other".
_REASONS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. `name` is without the prefix; `labels` are those beside the rank's."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


#: A metric's name and the values of its own labels.
Key: TypeAlias = tuple[str, tuple[str, ...]]

METRICS: Final = (
    Metric(
        "bytes_total",
        "counter",
        ("transport", "rail", "direction"),
        "Payload bytes that each rail has sent or received.",
    ),
    Metric(
        "blocks_total",
        "counter",
        ("transport",),
        "Blocks of transfers that this rank submitted and that are done.",
    ),
    Metric(
        "transfers_total",
        "counter",
        ("transport", "outcome"),
        "Transfers: submitted here (done, failed, cancelled), or landed here.",
    ),
    Metric(
        "transfer_failures_total",
        "counter",
        ("transport", "reason"),
        "Transfers that failed, by reason.",
    ),
    Metric(
        "links_ended_total",
        "counter",
        ("transport", "reason"),
        "Connections to other ranks that have ended, by reason.",
    ),
    Metric("rails_lost_total", "counter", ("transport",), "RDMA rails that went down."),
    Metric("rails_remade_total", "counter", ("transport",), "RDMA rails that came back."),
    Metric("connects_total", "counter", (), "Data connections that this rank opened."),
    Metric(
        "connects_fallen_back_total",
        "counter",
        (),
        "Data connections over a transport that was not the first choice.",
    ),
    Metric("fences_total", "counter", ("outcome",), "Fences: confirmed, or timed out."),
    Metric("fence_seconds_total", "counter", (), "Time of all confirmed fences."),
    Metric(
        "rooms_total",
        "counter",
        ("end",),
        "Requests that have ended on this rank, by end: done, failed, aborted, timed out,"
        " superseded.",
    ),
    Metric(
        "handover_bytes_total",
        "counter",
        (),
        "Bytes that this rank has handed over: KV cache, other state of requests, and metadata.",
    ),
    Metric(
        "early_bytes_total",
        "counter",
        (),
        "Bytes of KV cache that were written while the forward pass was still running.",
    ),
    Metric(
        "digested_cells_total",
        "counter",
        (),
        "Cells (a page in one layer and component) of which this rank has made a digest.",
    ),
    Metric("digested_bytes_total", "counter", (), "Bytes of these cells."),
    Metric("digest_seconds_total", "counter", (), "Time in which these digests were made."),
    Metric(
        "digests_compared_total",
        "counter",
        ("outcome",),
        "On decode ranks: what a prefill rank has sent for a request, compared with what has"
        " landed, by outcome: equal, different, not compared.",
    ),
    Metric(
        "fallbacks_total",
        "counter",
        ("reason",),
        "Requests or forward passes whose KV cache was sent after the forward pass instead of layer"
        " by layer, by reason.",
    ),
    Metric(
        "scheduler_calls_total",
        "counter",
        ("call",),
        "Calls of SGLang's scheduler to a sender or receiver.",
    ),
    Metric(
        "scheduler_seconds_total",
        "counter",
        ("call",),
        "Time that SGLang's scheduler thread spent in these calls.",
    ),
    Metric("rooms_open", "gauge", (), "Requests that are under way on this rank."),
    Metric("peers", "gauge", (), "Ranks that this rank can write to."),
    Metric(
        "refused_servers",
        "gauge",
        ("reason",),
        "On decode ranks: prefill servers that do not serve this rank, and will not until somebody"
        " changes a setting, by what differs.",
    ),
    Metric("rails", "gauge", (), "Rails in use, of both directions."),
    Metric("registered_bytes", "gauge", ("kind",), "Registered memory, by kind."),
    Metric(
        "stage_seconds",
        "histogram",
        ("stage",),
        "Time that requests spent in each stage (see explain).",
        _SECONDS,
    ),
    Metric(
        "handover_seconds",
        "histogram",
        (),
        "On prefill ranks: from when SGLang hands over the last part of a request until all of it"
        " has landed.",
        _SECONDS,
    ),
)

#: Of each process, whatever else it tells.
BUILD: Final = Metric(build.NAME.removeprefix(PREFIX), "gauge", ("version",), build.HELP)


def totals(stats: Stats, counted: Mapping[str, Any]) -> dict[Key, float]:
    """The counters now. `counted`: `Recorder.totals()`.

    What can be foreseen is there at 0 from the start: Prometheus' `rate` and `increase` do not see
    the first event of a counter that begins with it.
    """
    found: dict[Key, float] = dict(_at_zero(stats.transports)) | dict(_of_engine(stats))
    fences = stats.fences
    found |= {
        ("connects_total", ()): stats.connects,
        ("connects_fallen_back_total", ()): stats.connects_fallen_back,
        ("fences_total", ("confirmed",)): fences.confirmed,
        ("fences_total", ("timed out",)): fences.timed_out,
        ("fence_seconds_total", ()): fences.confirmed_s,
        ("handover_bytes_total", ()): counted["bytes"],
        ("early_bytes_total", ()): counted["bytes_early"],
    }
    digests = counted["digests"]
    found |= {
        ("digested_cells_total", ()): digests["cells"],
        ("digested_bytes_total", ()): digests["bytes"],
        ("digest_seconds_total", ()): digests["seconds"],
    }
    for outcome in COMPARED:
        found["digests_compared_total", (outcome,)] = digests[outcome]
    for end, count in counted["ends"].items():
        found["rooms_total", (end,)] = count
    for i, (reason, count) in enumerate(counted["fallbacks"].items()):
        key = "fallbacks_total", (reason if i < _REASONS_MAX else "other",)
        found[key] = found.get(key, 0) + count
    for call, (count, seconds) in counted["calls"].items():
        found["scheduler_calls_total", (call,)] = count
        found["scheduler_seconds_total", (call,)] = seconds
    return found


def _at_zero(transports: Iterable[str]) -> Iterator[tuple[Key, float]]:
    for end in ENDS:
        yield ("rooms_total", (end.value,)), 0
    for name in transports:
        for outcome in _OUTCOMES:
            yield ("transfers_total", (name, outcome)), 0
        for reason in _WHY:
            yield ("transfer_failures_total", (name, reason)), 0
            yield ("links_ended_total", (name, reason)), 0
        for counter in ("blocks_total", "rails_lost_total", "rails_remade_total"):
            yield (counter, (name,)), 0


def _of_engine(stats: Stats) -> Iterator[tuple[Key, float]]:
    for name, one in stats.by_transport.items():
        for i, rail in enumerate(one.rails):
            yield ("bytes_total", (name, str(i), "sent")), rail.bytes_sent
            yield ("bytes_total", (name, str(i), "received")), rail.bytes_received
        outcomes = one.outcomes
        yield ("blocks_total", (name,)), outcomes.blocks_done
        yield ("transfers_total", (name, "done")), outcomes.transfers_done
        yield ("transfers_total", (name, "cancelled")), outcomes.transfers_cancelled
        yield ("transfers_total", (name, "landed")), outcomes.transfers_landed
        yield ("transfers_total", (name, "failed")), sum(outcomes.transfers_failed.values())
        for reason, count in outcomes.transfers_failed.items():
            yield ("transfer_failures_total", (name, reason)), count
        for reason, count in one.links_ended.items():
            yield ("links_ended_total", (name, reason)), count
        yield ("rails_lost_total", (name,)), one.rails_lost
        yield ("rails_remade_total", (name,)), one.rails_remade


def gauges(stats: Stats, open_rooms: int, refused: Iterable[Why] | None = None) -> dict[Key, float]:
    """The gauges now. `refused`: why each prefill server and this rank do not serve each other;
    None for a prefill rank."""
    found: dict[Key, float] = {
        ("rooms_open", ()): open_rooms,
        ("peers", ()): stats.peers,
        ("rails", ()): stats.rails,
    }
    for kind, nbytes in stats.registered_bytes.items():
        found["registered_bytes", (kind,)] = nbytes
    if refused is not None:
        found |= {("refused_servers", (why.value,)): 0.0 for why in Why}
        for why in refused:
            found["refused_servers", (why.value,)] += 1
    return found


def observations(story: RoomStory) -> Iterator[tuple[Key, float]]:
    """What the histograms see of a room that is over."""
    stages = story.stages()
    for stage, spent_s in stages.items():
        yield ("stage_seconds", (stage,)), spent_s
    if story.role == "prefill" and story.end == "done":
        handover_s = sum(stages.get(one, 0.0) for one in ("planned", "posted", "acknowledged"))
        yield ("handover_seconds", ()), handover_s


class Deltas:
    """By how much counters have risen since the last look. One that fell has begun anew, as when
    the rank's engine was replaced: all of it is new."""

    def __init__(self) -> None:
        self._before: dict[Key, float] = {}

    def of(self, now: Mapping[Key, float]) -> dict[Key, float]:
        """Every key that is new is in it, also at 0: a counter should be there before it counts."""
        risen = {}
        for key, value in now.items():
            before = self._before.get(key)
            if before is None or value != before:
                risen[key] = value - before if before is not None and value >= before else value
        self._before |= now  # What another rank tells meanwhile may come back.
        return risen
