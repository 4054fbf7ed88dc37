# SPDX-License-Identifier: Apache-2.0
def chosen(
    lanes: list[tuple[float, float, bool]], nbytes: float, waiting: float, turn: int
) -> int | None:
    """Which lane takes a piece, None if it is to wait: ``choose`` in balance.pxd. Of each lane its
    speed in bytes per second, its bytes in flight and whether it has room. There is one."""

def rate_after(
    bytes_per_s: float, measurements: list[tuple[float, float]], is_retried: bool = False
) -> float:
    """The rate of a rail by a port of that speed, after bytes were moved in so many seconds; or of
    one that was slow, and is tried again as if it had that rate."""

def speeds(rates: list[float]) -> list[float]:
    """What the balancer reckons with where those rates were measured: ``speeds_of``."""

def slowness_of(distance: int) -> float:
    """How many times longer a byte needs by a device at that distance."""
