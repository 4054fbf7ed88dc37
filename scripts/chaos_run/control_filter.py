# SPDX-License-Identifier: Apache-2.0
"""A queueing discipline that disturbs some TCP ports and nothing else. Pure: tc's arguments.

`loss` packets of those ports vanish at random, as BPF's random numbers say; or they all pass one
narrow queue, and are late. It is the kernel that does so, to packets of real connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["classifier", "narrow", "vanishing"]

_ALL_BITS_PER_S = "10gbit"
_NARROW_BYTES = 4 << 20
# Opcodes of classic BPF (linux/filter.h): load a byte, two, four; jump if equal, if not below;
# return.
_LDB, _LDH, _LD, _JEQ, _JGE, _RET = 0x30, 0x28, 0x20, 0x15, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_IP_PROTOCOL, _SOURCE_PORT, _DESTINATION_PORT, _TCP = 23, 34, 36, 6
_YES, _NO = 0xFFFFFFFF, 0


def vanishing(device: str, ports: Sequence[int], loss: float) -> Iterator[tuple[str, ...]]:
    """Commands after which that share of the packets from and to `ports` is gone."""
    yield from _with_class(device, "100mbit", ports, loss)
    yield _qdisc(device, "parent", "1:30", "handle", "30:", "pfifo", "limit", "0")


def narrow(device: str, ports: Sequence[int], bits_per_s: float) -> Iterator[tuple[str, ...]]:
    """Commands after which packets from and to `ports` pass at that rate, in order."""
    yield from _with_class(device, f"{bits_per_s:.0f}bit", ports, 1.0)
    queue = ("handle", "30:", "bfifo", "limit", str(_NARROW_BYTES))
    yield _qdisc(device, "parent", "1:30", *queue)


def _with_class(
    device: str, rate: str, ports: Sequence[int], share: float
) -> Iterator[tuple[str, ...]]:
    yield ("tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb", "default", "10")
    for name, speed in (("1:10", _ALL_BITS_PER_S), ("1:30", rate)):
        bucket = ("htb", "rate", speed, "quantum", "60000")
        yield ("tc", "class", "add", "dev", device, "parent", "1:", "classid", name, *bucket)
    where = ("tc", "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1")
    yield (*where, "bpf", "bytecode", classifier(ports, share), "classid", "1:30")


def _qdisc(device: str, *rest: str) -> tuple[str, ...]:
    return ("tc", "qdisc", "add", "dev", device, *rest)


def classifier(ports: Sequence[int], share: float) -> str:
    """A program of classic BPF, in tc's form, for Ethernet frames of IPv4 without options: says yes
    to `share` of the TCP segments from or to one of `ports`."""
    if not ports:
        raise ValueError("no ports are given whose packets shall be disturbed")
    tests = [
        (_LDH, _SOURCE_PORT),
        *((_JEQ, port) for port in ports),
        (_LDH, _DESTINATION_PORT),
        *((_JEQ, port) for port in ports),
    ]
    # Behind the tests: no; then the draw; then yes and no of the draw.
    program = [(_LDB, 0, 0, _IP_PROTOCOL), (_JEQ, 0, len(tests), _TCP)]
    for nth, (code, value) in enumerate(tests):
        to_draw = len(tests) - nth if code == _JEQ else 0
        program.append((code, to_draw, 0, value))
    program.append((_RET, 0, 0, _NO))
    program.append((_LD, 0, 0, _RANDOM))
    program.append((_JGE, 1, 0, round(share * _YES)))
    program += [(_RET, 0, 0, _YES), (_RET, 0, 0, _NO)]
    lines = (f"{code} {yes} {no} {value}" for code, yes, no, value in program)
    return f"{len(program)}," + ",".join(lines)
