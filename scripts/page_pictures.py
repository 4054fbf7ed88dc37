# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the registry's status page anew: a real registry, ranks that say what they
do, one of which is killed and one in trouble, and Chromium with a wide and a narrow window."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    PARSER = Parser(".venv/bin/python scripts/page_pictures.py", __doc__)
    PARSER.add_argument(
        "--to", type=Path, default=Path("docs/images"), metavar="FOLDER", help="(docs/images)"
    )
    OPTIONS = PARSER.parse_args()

sys.path.extend(
    str(Path(__file__).parents[1] / folder)
    for folder in ("", "tests/support", "tests/bootstrap_server")
)

from bootstrap_rank import rank_process
from chromium import Tab, browser

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    FailureStatus,
    InstanceConfig,
    KVFormat,
    PeerStatus,
    RailStatus,
    Rank,
    RankCoords,
    RankLease,
    RankRecord,
    RankStatus,
    Topology,
    TransportRate,
)

PREFILL, DECODE = Topology(2, 1, 4, 1), (8, 1, 2, 1)
KILLED, IN_TROUBLE = RankCoords(0, 0, 2, 0), RankCoords(1, 0, 1, 0)
#: When the ranks were started, about.
BEGAN_NS = time.time_ns()
WIDE, NARROW = (1200, 1010), (400, 900)


def record(coords: RankCoords) -> RankRecord:
    number = PREFILL.index(coords)
    epoch = BEGAN_NS - (number + 1) * 10**12
    rank = Rank(coords, "10.0.0.1", 20_000 + 2 * number, epoch, 30_000)
    return RankRecord(InstanceConfig(PREFILL, KVFormat(64, "bfloat16"), protocol=1), rank)


def peers(coords: RankCoords, seed: random.Random) -> tuple[PeerStatus, ...]:
    """The decode ranks that need this rank's heads; a few are not connected."""
    needed = [(dp, 0, coords.tp // 2, 0) for dp in range(DECODE[0])]
    return tuple(
        PeerStatus(
            f"{dp:02x}{tp:02x}",
            f"10.0.1.{dp + 1}",
            (dp, cp, tp, pp),
            DECODE,
            "rdma",
            seed.choice([0.0, 3e8, 4e9, 9e9]),
        )
        for dp, cp, tp, pp in needed
        if seed.random() > 0.15
    )


def status(coords: RankCoords, failed: int = 0) -> RankStatus:
    seed = random.Random(str(coords))
    found = peers(coords, seed)
    reason = (
        "made no progress for 5 s: the transfer to decode rank (dp 3 cp 0 tp 0 pp 0) at 10.0.1.4"
    )
    return RankStatus(
        rates=(TransportRate("rdma", 0.0, 2e10), TransportRate("tcp", 0.0, 3e8)),
        rails=(RailStatus("mlx5_0", True, 1e10), RailStatus("mlx5_1", coords.tp != 3, 1e10)),
        peers=found,
        peers_total=len(found),
        rooms={"open": 3, "done": 1234 + 50 * bool(failed), "failed": failed, "aborted": 2},
        failures=(FailureStatus(time.time() - 40, reason, failed),) if failed else (),
    )


@contextmanager
def ranks(server: BootstrapServer) -> Iterator[None]:
    """All of them, in this process but for one, which has been killed when this goes on."""
    where = f"127.0.0.1:{server.port}"
    client = BootstrapClient(where)
    failed: Counter[RankCoords] = Counter()
    with ExitStack() as undo:
        for coords in PREFILL.coords():
            if coords == KILLED:
                process = undo.enter_context(rank_process(where, record(coords), status(coords)))
                continue
            lease = RankLease(
                where,
                record(coords),
                status=lambda coords=coords: status(coords, failed[coords]),  # type: ignore[misc]
            )
            undo.callback(lease.close)
            lease.renew()
        failed[IN_TROUBLE] = 12  # Between two reports, which the registry compares.
        client.renew(record(IN_TROUBLE).rank, status(IN_TROUBLE, failed[IN_TROUBLE]))
        client.give_up([4711], "page_size is 64 on prefill and 16 on decode")
        process.kill()
        yield


async def take(tab: Tab, server: BootstrapServer, folder: Path) -> None:
    await tab.resize(*WIDE)
    await tab.open(f"http://127.0.0.1:{server.port}/")
    await tab.until("document.querySelector('#ranks tbody tr')?.textContent.includes('lost')")
    await tab.until("document.querySelectorAll('#matrix td').length > 0")
    await tab.screenshot(folder / "status-page.png")
    await tab.resize(*NARROW)
    await tab.until("document.querySelector('#ranks .wide').offsetParent === null")
    await tab.screenshot(folder / "status-page-narrow.png")


async def main(folder: Path) -> None:
    async with browser() as tab:  # First: it may take longer to start than a lease.
        with BootstrapServer("127.0.0.1", 0) as server, ranks(server):
            await take(tab, server, folder)
    print(f"page_pictures: {folder}/status-page.png, {folder}/status-page-narrow.png")


if __name__ == "__main__":
    asyncio.run(main(OPTIONS.to))
