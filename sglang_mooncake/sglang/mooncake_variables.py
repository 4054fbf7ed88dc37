# SPDX-License-Identifier: Apache-2.0
"""Variables of Mooncake's engine, which published commands set: what te can do of them is taken
over where nothing of ours says otherwise. Pure: `config.py` hands the environment in.

Names and meanings are those of Mooncake's `config.cpp` and `environ.cpp`. MC_IB_PKEY_INDEX is not
read there, but is found in commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bootstrap_server.settings.values import names, whole
from te.config import LIMITS

__all__ = ["VARIABLES", "Courtesies", "read_courtesies"]

#: A setting of ours, without the prefix, and Mooncake's variables for it, the strongest first.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "GID_INDEX": ("MC_GID_INDEX",),
    "TRAFFIC_CLASS": ("MC_IB_TC",),
    "SERVICE_LEVEL": ("MC_IB_SL",),
    "PARTITION_KEY_INDEX": ("MC_PKEY_INDEX", "MC_IB_PKEY_INDEX"),
}
_AUTOMATIC = -1
_TCP = {"MC_FORCE_TCP": ("1", "true", "yes", "on"), "MOONCAKE_PROTOCOL": ("tcp",)}
_FILTERS, _EXCLUDE = "MC_TE_FILTERS", "MC_TE_FILTERS_EXCLUDE"
_PORT_FIRST, _PORT_LAST = "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"
#: As Mooncake's documentation spells them; its engine reads these, too.
_ALSO_SPELLED = {_PORT_FIRST: "MC_MIN_PRC_PORT", _PORT_LAST: "MC_MAX_PRC_PORT"}
#: Mooncake's range where only one end of it is given.
_PORTS_OF_MOONCAKE = {_PORT_FIRST: "15000", _PORT_LAST: "17000"}
_TOPOLOGY = "MC_CUSTOM_TOPO_JSON"
#: Those whose values mean something else here, and what is set instead of them.
_SET_INSTEAD = {
    "MC_NUM_QP_PER_EP": "RAILS_PER_NIC",
    "MC_WORKERS_PER_CTX": "WORKERS",
    "MC_TRANSFER_TIMEOUT": "STALL_TIMEOUT_S",
    "MC_SLICE_TIMEOUT": "STALL_TIMEOUT_S",
    "MC_TCP_BIND_ADDRESS": "HOST",
    "MC_RDMA_BIND_ADDRESS": "HOST",
}
#: Each setting, without the prefix, and Mooncake's variables that may give it a value.
VARIABLES: dict[str, tuple[str, ...]] = {
    **_NUMBERS,
    "TRANSPORTS": tuple(f"{name}={values[0]}" for name, values in _TCP.items()),
    "NICS": (_FILTERS, _EXCLUDE),
    "TOPOLOGY": (_TOPOLOGY,),
    "PORTS": (_PORT_FIRST, _PORT_LAST),
}
#: A topology names the devices itself: one of the two is used.
_INSTEAD_OF = {"NICS": "TOPOLOGY", "TOPOLOGY": "NICS"}


@dataclass(frozen=True, slots=True)
class Courtesies:
    """What Mooncake's variables say."""

    #: Settings of ours, by name without the prefix, in the form of our variables.
    settings: dict[str, str]
    #: Where each of them comes from: `MC_GID_INDEX=3`.
    sources: dict[str, str]
    #: What became of each variable, for the log.
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Wish:
    #: As it stands in the environment: `MC_GID_INDEX=3`.
    said: str
    ours: str
    value: str
    #: What else comes first.
    unless: str = ""
    #: Why it cannot be used; Mooncake, too, goes on without.
    problem: str = ""


def read_courtesies(
    environment: Mapping[str, str], given: Mapping[str, str], prefix: str
) -> Courtesies:
    """What is taken over from Mooncake's variables.

    Args:
        given: our own settings that have a value, without the prefix, and how that was said
            (`SGLANG_MOONCAKE_RAILS=4`); they come first.

    What cannot be used is a note, and no error, as for Mooncake itself.
    """
    there = {name: text.strip() for name, text in environment.items() if text.strip()}
    for name, spelled in _ALSO_SPELLED.items():
        if spelled in there:
            there.setdefault(name, there[spelled])
    ours = dict(given)
    settings: dict[str, str] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    for wish in _wishes(there):
        other = ours.get(wish.ours) or ours.get(_INSTEAD_OF.get(wish.ours, ""))
        if wish.problem:
            notes.append(f"{wish.said} is not used: {wish.problem}")
        elif other is None:
            settings[wish.ours] = wish.value
            sources[wish.ours] = ours[wish.ours] = wish.said
            honoured = f"{wish.said} is honoured as {prefix}{wish.ours}={wish.value}"
            notes.append(honoured + wish.unless)
        elif settings.get(wish.ours) == wish.value:
            notes.append(f"{wish.said} says the same")
        else:
            notes.append(f"{wish.said} is not used, {other} is")
    return Courtesies(settings, sources, (*notes, *_idle(there, prefix)))


def _wishes(there: Mapping[str, str]) -> Iterator[_Wish]:
    """Each thing that te can do; of two for one setting the stronger first."""
    for ours, variables in _NUMBERS.items():
        for name in variables:
            if name in there:
                yield from _number(name, there[name], ours)
    for name, values in _TCP.items():
        if there.get(name, "").lower() in values:
            yield _Wish(f"{name}={there[name]}", "TRANSPORTS", "tcp")
    if _TOPOLOGY in there:
        yield _Wish(f"{_TOPOLOGY}={there[_TOPOLOGY]}", "TOPOLOGY", there[_TOPOLOGY])
    yield from _devices(there)
    yield from _ports(there)


def _number(name: str, text: str, ours: str) -> Iterator[_Wish]:
    said = f"{name}={text}"
    try:
        number = whole(_AUTOMATIC, LIMITS[ours.lower()][1]).read(text)
    except ValueError as error:
        yield _Wish(said, ours, "", problem=str(error))
        return
    if number != _AUTOMATIC:
        yield _Wish(said, ours, str(number))


def _devices(there: Mapping[str, str]) -> Iterator[_Wish]:
    given = [name for name in (_FILTERS, _EXCLUDE) if name in there]
    wanted = names(there.get(_FILTERS, ""))
    unwanted = tuple(f"!{name}" for name in names(there.get(_EXCLUDE, "")))
    if given:
        said = ", ".join(f"{name}={there[name]}" for name in given)
        unless = " where --disaggregation-ib-device names none"
        yield _Wish(said, "NICS", ",".join(wanted + unwanted), unless)


def _ports(there: Mapping[str, str]) -> Iterator[_Wish]:
    given = [name for name in (_PORT_FIRST, _PORT_LAST) if name in there]
    if not given:
        return
    said = ", ".join(f"{name}={there[name]}" for name in given)
    ends: list[int] = []
    for name, default in _PORTS_OF_MOONCAKE.items():
        text = there.get(name, default)
        try:
            ends.append(whole(1, 65_535).read(text))
        except ValueError as error:
            yield _Wish(said, "PORTS", "", problem=f"{name}={text!r}: {error}")
            return
    first, last = ends
    if _PORT_LAST not in there and first > last:
        last = 65_535
    if first > last:
        why = f"the first port, {first}, is above the last, {last}"
        yield _Wish(said, "PORTS", "", problem=why)
        return
    yield _Wish(said, "PORTS", f"{first}-{last}")


def _idle(there: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Those that have another form here, and those that tune what te does not have."""
    known = {_FILTERS, _EXCLUDE, _PORT_FIRST, _PORT_LAST, _TOPOLOGY, *_ALSO_SPELLED.values()}
    known.update(name for name, values in _TCP.items() if there.get(name, "").lower() in values)
    known.update(name for variables in _NUMBERS.values() for name in variables)
    unknown = sorted(name for name in there if name.startswith("MC_") and name not in known)
    for name in unknown:
        if name in _SET_INSTEAD:
            yield f"{name} has no effect here: set {prefix}{_SET_INSTEAD[name]} instead"
    others = [name for name in unknown if name not in _SET_INSTEAD]
    if others:
        yield f"{', '.join(others)}: no effect here"
