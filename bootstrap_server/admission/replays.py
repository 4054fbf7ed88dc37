# SPDX-License-Identifier: Apache-2.0
"""Which requests a registry has had already. Pure: the caller passes the time in.

A client numbers its requests, which may overtake each other a little, as those of its threads do.
So of each client the highest number is kept, and which of the `WINDOW` before it have been there
(as IPsec has it, RFC 4303 3.4.3). A client is forgotten once all that it can have sent is too old
to be taken. When there is no room for another client it is refused, and nobody is pushed out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

__all__ = ["CLIENTS_MAX", "CLIENTS_OF_ONE_ADDRESS_MAX", "SKEW_MAX_S", "WINDOW", "Replays"]

#: How far the clocks of a client and of the server may be apart.
SKEW_MAX_S: Final = 300.0
WINDOW: Final = 1024
#: A client is a process. One costs about 0.5 kB for ten minutes after its last request.
CLIENTS_MAX: Final = 1 << 17
CLIENTS_OF_ONE_ADDRESS_MAX: Final = 1 << 14


@dataclass(slots=True)
class _Client:
    address: str
    highest: int
    #: Bit n: the number `highest - n` has been there.
    seen: int
    forget_s: float


class Replays:
    """Takes each (client, number) once. Only for requests whose MAC is right: whoever has no key
    uses no memory here."""

    def __init__(
        self,
        clients_max: int = CLIENTS_MAX,
        of_one_address_max: int = CLIENTS_OF_ONE_ADDRESS_MAX,
    ) -> None:
        self._clients_max, self._of_one_address_max = clients_max, of_one_address_max
        #: Last heard of first.
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._of_address: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many clients are known."""
        return len(self._clients)

    def refusal(
        self, client: bytes, number: int, time_s: float, now_s: float, address: str
    ) -> str | None:
        """Why a request that says to be of `time_s` is not taken; None when it is, this once.

        `address` is the one that a client not known yet counts for.
        """
        if abs(now_s - time_s) > SKEW_MAX_S:
            return (
                f"its clock says {time_s:.0f} and ours {now_s:.0f} (seconds since 1970), which is "
                f"more than {SKEW_MAX_S:g} s apart: set the clocks"
            )
        self._forget(now_s)
        # What it has sent may be of a clock ahead of ours.
        forget_s = now_s + 2 * SKEW_MAX_S
        known = self._clients.get(client)
        if known is None:
            return self._add(client, _Client(address, number, 1, forget_s))
        if number > known.highest:
            behind = min(number - known.highest, WINDOW)
            known.seen = (known.seen << behind | 1) & ((1 << WINDOW) - 1)
            known.highest = number
        else:
            bit = 1 << min(known.highest - number, WINDOW)
            if known.seen & bit or bit >> WINDOW:
                return (
                    f"request {number} of this client is a replay: it was received before, or is"
                    " too old"
                )
            known.seen |= bit
        known.forget_s = forget_s
        self._clients.move_to_end(client)
        return None

    def _add(self, client: bytes, new: _Client) -> str | None:
        of_address = self._of_address[new.address]
        if of_address >= self._of_one_address_max or len(self._clients) >= self._clients_max:
            return (
                f"{of_address} clients of this address and {len(self._clients)} in all are known, "
                "which is the limit"
            )
        self._clients[client] = new
        self._of_address[new.address] += 1
        return None

    def _forget(self, now_s: float) -> None:
        while self._clients:
            client, oldest = next(iter(self._clients.items()))
            if now_s < oldest.forget_s:
                return
            del self._clients[client]
            self._of_address[oldest.address] -= 1
            if not self._of_address[oldest.address]:
                del self._of_address[oldest.address]
