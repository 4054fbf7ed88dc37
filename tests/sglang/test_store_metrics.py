# SPDX-License-Identifier: Apache-2.0
"""What a rank's part of the store tells Prometheus, counted by prometheus_client itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_host import store_directory

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang says of this process; the parts may be changed."""
    from sglang_mooncake.sglang.store import figures

    server = SimpleNamespace(
        observability=SimpleNamespace(enable_metrics=True),
        serving=SimpleNamespace(served_model_name="/models/m", port=30000),
        disagg=SimpleNamespace(disaggregation_mode="null"),
        parallel=SimpleNamespace(
            attn_dp_size=1, attn_dp_rank=0, dp_rank=None, attn_cp_rank=0, attn_tp_rank=1, pp_rank=0
        ),
    )
    for name in vars(server):
        monkeypatch.setattr(figures, f"get_{name}", lambda name=name: getattr(server, name))
    return server


RANK = {
    "model_name": "/models/m", "role": "null", "dp_rank": "0", "cp_rank": "0", "tp_rank": "1",
    "pp_rank": "0",
}  # fmt: skip


def test_figures_are_what_sglang_has_stored_and_loaded(
    server: SimpleNamespace, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import store_linking as linking
    from prometheus_client import CollectorRegistry

    from sglang_mooncake.sglang.store.figures import open_exporter

    registry = CollectorRegistry()
    linker = linking.make(
        directory, linking.mha_pool(), monkeypatch, partial(open_exporter, registry=registry)
    )
    linking.fill(linker)
    keys = linking.hashes(3)
    assert linking.offloaded(linker, keys, 5, 2, 9)
    assert linker.lookup("r", linking.transfer([*keys, *linking.hashes(2, 1)])) == [1, 2, 3]
    assert linking.loaded(linker, keys, 1, 14, 7)
    (pool,) = linker._pools.values()
    page_bytes = pool.pages.page_bytes
    linker.close()  # The last figures are told then.

    def told(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvstore_{name}", RANK | labels)

    assert told("puts_total", outcome="stored") == 3
    assert told("lookups_total", outcome="found") == 3
    assert told("lookups_total", outcome="missing") == 2
    assert told("gets_total", outcome="right") == 3
    assert told("got_bytes_total") == told("put_bytes_total") == 3 * page_bytes
    assert told("objects") == told("published_total") == 3
    assert told("lent_bytes") == 4 << 20


@pytest.mark.parametrize(
    ("parallel", "dp"),
    [
        ({"attn_dp_size": 4, "attn_dp_rank": 3}, "3"),
        ({"dp_rank": 2}, "2"),
        ({"dp_rank": None}, "0"),
    ],
)
def test_ranks_of_either_kind_of_dp_are_told_apart(
    server: SimpleNamespace, parallel: dict[str, Any], dp: str
) -> None:
    from prometheus_client import CollectorRegistry

    import kvstore
    from kvstore.client.status import StoreStatus
    from sglang_mooncake.sglang.store.figures import open_exporter

    vars(server.parallel).update(parallel)
    registry = CollectorRegistry()
    idle = StoreStatus(8, "x", 0, None, (), {}, {}, {}, 0, 0, 0)
    exporter = open_exporter(lambda: idle, registry)
    assert exporter is not None
    exporter.close()
    assert registry.get_sample_value("kvstore_lent_bytes", RANK | {"dp_rank": dp}) == 0
    release = RANK | {"dp_rank": dp, "version": kvstore.__version__}
    assert registry.get_sample_value("sglang_mooncake_build_info", release) == 1


def test_without_sglangs_flag_nothing_is_told(server: SimpleNamespace) -> None:
    from sglang_mooncake.sglang.store.figures import open_exporter

    server.observability.enable_metrics = False
    assert open_exporter(lambda: pytest.fail("nobody asks")) is None


@pytest.mark.parametrize(("role", "shown"), [("null", "server"), ("prefill", "prefill")])
def test_programs_name_the_server_of_a_part_of_the_store(
    server: SimpleNamespace, role: str, shown: str
) -> None:
    from sglang_mooncake.sglang.store.figures import store_label

    server.disagg.disaggregation_mode = role
    assert store_label() == f"store of {shown} (dp 0 cp 0 tp 1 pp 0) of m, port 30000"
