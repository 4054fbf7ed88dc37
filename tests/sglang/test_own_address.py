# SPDX-License-Identifier: Apache-2.0
"""What a rank takes from SGLang about its server: the address of this host where SGLang finds none,
as without a default route, and what programs call the rank's engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def asked(monkeypatch):
    """`own_address()` of a server with this `--host`, where SGLang looks in vain."""
    from sglang.srt.utils import network

    from sglang_mooncake.sglang import seam

    for name in ("SGLANG_HOST_IP", "HOST_IP", "SGLANG_LOCAL_IP_NIC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "get_local_ip_by_remote", lambda: None)

    def asked(host: str) -> str:
        monkeypatch.setattr(seam, "get_serving", lambda: SimpleNamespace(host=host))
        return seam.own_address()

    return asked


@pytest.mark.parametrize(
    ("host", "address"), [("10.9.0.1", "10.9.0.1"), ("[fd00::1]", "fd00::1"), ("node7", "node7")]
)
def test_a_concrete_host_is_the_address_where_there_is_no_default_route(asked, host, address):
    assert asked(host) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_a_wildcard_is_refused_with_the_variable_that_helps(asked, host):
    from sglang_mooncake.sglang.seam import UnsupportedServer

    with pytest.raises(UnsupportedServer, match="SGLANG_HOST_IP, or as --host"):
        asked(host)


def test_the_variable_of_sglang_comes_first(asked, monkeypatch):
    monkeypatch.setenv("SGLANG_HOST_IP", "10.9.0.7")
    assert asked("10.9.0.1") == "10.9.0.7"


def test_te_top_names_role_port_and_model(monkeypatch):
    from bootstrap_server import RankCoords
    from sglang_mooncake.sglang import seam

    serving = SimpleNamespace(served_model_name="/models/m/", port=30000)
    monkeypatch.setattr(seam, "get_serving", lambda: serving)
    rank = SimpleNamespace(role="prefill", coords=RankCoords(0, 0, 1, 0))
    assert seam.rank_label(rank) == "prefill (dp 0 cp 0 tp 1 pp 0) of m, port 30000"
