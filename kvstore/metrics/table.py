# SPDX-License-Identifier: Apache-2.0
"""What a process's part of the store tells a monitoring system: the table of metrics, and how their
values follow from ``StoreStatus``. Pure.

They are counts alone, without a name of a process, a host or an object, so that whoever reaches the
port may read them. Values of labels come from code, so that their number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias

from bootstrap_server.prometheus_text import family
from kvstore.client.load_times import AdmissionCounts
from kvstore.client.status import StoreStatus
from kvstore.objects.outcomes import Got, Put

__all__ = ["METRICS", "PREFIX", "Key", "Metric", "counters", "gauges", "text"]

PREFIX: Final = "kvstore_"
_LOOKUPS: Final = ("found", "rejected", "missing")


class Metric(NamedTuple):
    """One row. ``name`` is without the prefix."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


#: A metric's name and the values of its labels.
Key: TypeAlias = tuple[str, tuple[str, ...]]

METRICS: Final = (
    Metric(
        "lookups_total",
        "counter",
        ("outcome",),
        "Objects that this process looked up: found, missing, or rejected, which means that the key"
        " is stored only under another signature or size.",
    ),
    Metric(
        "gets_total",
        "counter",
        ("outcome",),
        "Objects that this process read: right, or why they did not come.",
    ),
    Metric(
        "puts_total",
        "counter",
        ("outcome",),
        "Objects that this process offered: stored, there already, or why they were not stored.",
    ),
    Metric("got_bytes_total", "counter", (), "Bytes of the objects that this process read."),
    Metric("put_bytes_total", "counter", (), "Bytes of the objects that this process stored."),
    Metric(
        "admission_objects_total",
        "counter",
        ("verdict",),
        "Objects that were found, by what was done with them: admitted to be loaded, or declined,"
        " since computing them was expected to take less time.",
    ),
    Metric(
        "admission_loads_total",
        "counter",
        ("outcome",),
        "Loads whose time was estimated beforehand: paid, or unpaid, which means that they took"
        " longer than computing their objects would have.",
    ),
    Metric(
        "admission_loads_seconds_total",
        "counter",
        ("time",),
        "Time of these loads: expected, and taken.",
    ),
    Metric("lent_bytes", "gauge", (), "Memory that this process lends to the store."),
    Metric("used_bytes", "gauge", (), "Lent memory that objects or claims occupy."),
    Metric("objects", "gauge", (), "Objects in this process's lent memory."),
    Metric(
        "claims_total",
        "counter",
        ("verdict",),
        "Objects for which somebody asked this owner for a place, by its answer.",
    ),
    Metric("published_total", "counter", (), "Objects that were stored in the lent memory."),
    Metric(
        "abandoned_total",
        "counter",
        (),
        "Objects that were given a place and never stored, such as those of a client that died.",
    ),
    Metric("evicted_total", "counter", (), "Objects that were evicted for others."),
    Metric("pinned_objects", "gauge", (), "Objects that must not be evicted."),
    Metric("removed_total", "counter", (), "Objects that a client removed."),
    Metric(
        "lower_tier_objects",
        "gauge",
        (),
        "Objects in the lower tier of this process's lent memory.",
    ),
    Metric("lower_tier_bytes", "gauge", (), "Bytes of the objects in the lower tier."),
    Metric("demoting_objects", "gauge", (), "Objects that are being written to the lower tier."),
    Metric("demoted_total", "counter", (), "Evicted objects that were written to the lower tier."),
    Metric("promoted_total", "counter", (), "Objects that were read from the lower tier."),
    Metric(
        "dropped_total",
        "counter",
        (),
        "Objects that were evicted and not demoted: the lower tier is too slow, or refuses them.",
    ),
    Metric("tier_failed_total", "counter", (), "Reads and writes of the tier that failed."),
    Metric(
        "tier_corrupted_total",
        "counter",
        (),
        "Objects of the tier that were not what was written, and were dropped.",
    ),
    Metric(
        "owners",
        "gauge",
        ("state",),
        "Other processes that lend memory: usable, or unusable because they do not answer.",
    ),
    Metric(
        "known_objects",
        "gauge",
        (),
        "Objects of other owners that this process knows of, copies counted.",
    ),
    Metric("table_bytes", "gauge", (), "Memory of the table of what all owners hold."),
)


def counters(status: StoreStatus) -> dict[Key, float]:
    """What only rises, as long as the process lives."""
    found: dict[Key, float] = {
        ("got_bytes_total", ()): status.bytes_got,
        ("put_bytes_total", ()): status.bytes_put,
        **_by_outcome("lookups_total", status.lookups, _LOOKUPS),
        **_by_outcome("gets_total", status.gets, _values(Got)),
        **_by_outcome("puts_total", status.puts, _values(Put)),
        **_admission(status.admission),
    }
    own = status.own
    if own is not None:
        found |= {
            ("published_total", ()): own.published,
            ("abandoned_total", ()): own.abandoned,
            ("evicted_total", ()): own.evicted,
            ("removed_total", ()): own.removed,
            ("demoted_total", ()): own.demoted,
            ("promoted_total", ()): own.promoted,
            ("dropped_total", ()): own.dropped,
            ("tier_failed_total", ()): own.tier_failed,
            ("tier_corrupted_total", ()): own.tier_corrupted,
            **_by_outcome("claims_total", own.claims, ()),
        }
    return found


def gauges(status: StoreStatus) -> dict[Key, float]:
    """What is now."""
    usable = sum(one.usable for one in status.owners)
    found: dict[Key, float] = {
        ("lent_bytes", ()): status.memory,
        ("owners", ("usable",)): usable,
        ("owners", ("unusable",)): len(status.owners) - usable,
        ("known_objects", ()): sum(one.objects for one in status.owners),
        ("table_bytes", ()): status.table_bytes,
    }
    if status.own is not None:
        found["used_bytes", ()] = status.own.bytes_used
        found["pinned_objects", ()] = status.own.pinned
        found["objects", ()] = status.own.objects
        found["lower_tier_objects", ()] = status.own.lower_tier
        found["demoting_objects", ()] = status.own.demoting
        found["lower_tier_bytes", ()] = status.own.lower_tier_bytes
    return found


def text(status: StoreStatus) -> str:
    """The answer to ``GET /metrics``."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for (name, labels), value in (counters(status) | gauges(status)).items():
        values.setdefault(name, {})[labels] = value
    lines = [
        line
        for one in METRICS
        if one.name in values
        for line in family(PREFIX + one.name, one.kind, one.help, one.labels, values[one.name])
    ]
    return "\n".join([*lines, ""])


def _admission(counts: AdmissionCounts) -> dict[Key, float]:
    return {
        ("admission_objects_total", ("admitted",)): counts.admitted,
        ("admission_objects_total", ("declined",)): counts.declined,
        ("admission_loads_total", ("paid",)): counts.loads - counts.unpaid,
        ("admission_loads_total", ("unpaid",)): counts.unpaid,
        ("admission_loads_seconds_total", ("expected",)): counts.expected_s,
        ("admission_loads_seconds_total", ("took",)): counts.took_s,
    }


def _values(outcomes: type[Enum]) -> list[str]:
    return [str(one.value) for one in outcomes]


def _by_outcome(name: str, counted: Mapping[str, int], known: Iterable[str]) -> dict[Key, float]:
    """Outcomes that never came are there at 0: a rate needs a counter before it counts."""
    return {(name, (one,)): float(counted.get(one, 0)) for one in {*known, *counted}}
