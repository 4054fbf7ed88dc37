# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connector of NIXL, unmodified, over te: a prefill and a decode server on the CPU, and
the faults that scripts/nixl-beside shows beside NVIDIA's NIXL."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet
from cpu_serving.vllm_servers import ask, imported_tokens
from nixl_beside import pairs
from nixl_beside.options import parse
from nixl_beside.rows import Answers, Served
from nixl_beside.servers import Known, Pair, known, start_alone

# Starting a server takes 20 CPU-seconds.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: In which a request is answered whose prompt does not come: until te gives up, to connect again,
#: and to compute the prompt; by a machine that others use, too.
ANSWERED_S = 60.0
FREE_S = 20.0
OPTIONS = parse(["--requests", "4", "--patience", str(ANSWERED_S)])


@dataclass
class Servers:
    pair: Pair
    asked: Known
    logs: Path

    def answers(self) -> Answers:
        with self.pair.proxy() as proxy:
            got = ask(proxy, self.asked.requests)
        return self.asked.counted(list(enumerate(got)))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("vllm")
    with tempfile.TemporaryDirectory(prefix="kv") as path, Fleet(logs, nursery) as fleet:
        alone = start_alone(fleet, Path(path))
        pair = Pair(fleet, Path(path), "te", "NixlConnector")
        yield Servers(pair, known(alone, *pairs.KNOWN), logs)


def check_right(found: Answers) -> None:
    assert (found.wrong, found.failed) == (0, 0)
    assert found.right == found.asked > 0


def test_a_pair_answers_as_one_server(servers: Servers) -> None:
    before = imported_tokens(servers.pair.decode)
    check_right(servers.answers())
    assert imported_tokens(servers.pair.decode) > before
    for log in servers.logs.glob("te-*.log"):
        said = "mooncake.engine and nixl are te, and mooncake.store is kvstore"
        assert said in log.read_text(), log.name


def test_blocks_of_the_prefill_server_are_free_once_they_were_read(servers: Servers) -> None:
    """It hears of that by a note, long before its lease of 30 s runs out."""
    began_s = time.monotonic()
    servers.answers()
    while servers.pair.prefill.metric("vllm:kv_cache_usage_perc"):
        # A server without requests says nothing of its blocks.
        ask(servers.pair.prefill, servers.asked.requests[:1])
        assert time.monotonic() < began_s + FREE_S
        time.sleep(0.1)


def test_severed_connections_are_made_again(servers: Servers) -> None:
    """By themselves, each time; with NVIDIA's NIXL every later read fails."""
    found = pairs.severed(servers.pair, servers.asked, OPTIONS)
    check_right(found)
    assert found.came == found.asked


def test_a_prefill_server_that_stands_still_costs_a_computation(servers: Servers) -> None:
    """Where NVIDIA's NIXL waits for as long as it does."""
    found: Served = pairs.prefill_stopped(servers.pair, servers.asked, OPTIONS)
    assert found.is_right
    assert found.after_s is not None
    before, began_s = imported_tokens(servers.pair.decode), time.monotonic()
    while imported_tokens(servers.pair.decode) == before:  # And prompts come again, by themselves.
        assert time.monotonic() < began_s + ANSWERED_S
        check_right(servers.answers())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.one_of("nixl-faults", one))
        for one in ("decode-stopped", "prefill-killed", "decode-killed")
    ],
)
def test_after_a_fault_under_traffic_prompts_come_again(servers: Servers, name: str) -> None:
    """Clients of a server that is gone hear of that; no answer is wrong. While one is gone, the
    other one answers: the decode server computes a prompt that it was promised."""
    found = pairs.row(name, servers.pair, servers.asked, OPTIONS)
    assert isinstance(found, Answers)
    assert found.wrong == 0
    assert found.again_s is not None
    if name == "decode-stopped":
        check_right(found)
    else:
        assert found.meanwhile is not None
        assert found.meanwhile.is_right
        assert found.meanwhile.after_s is not None
