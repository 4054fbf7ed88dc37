# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from sglang_mooncake.config import SGLANGS_OWN, Config, ConfigError
from sglang_mooncake.registries import Registries


def test_nothing_given_means_the_defaults():
    assert Config.from_environment({"PATH": "/bin", "SGLANG_HOST_IP": "::1"}) == Config()


def test_a_topology_takes_the_place_of_the_devices():
    given = {"SGLANG_MOONCAKE_TOPOLOGY": "/etc/topology.json"}
    assert Config.from_environment(given) == Config(topology=Path("/etc/topology.json"))
    with pytest.raises(ConfigError, match="TOPOLOGY is complete: SGLANG_MOONCAKE_NICS cannot"):
        Config.from_environment({**given, "SGLANG_MOONCAKE_NICS": "mlx5_0"})


def test_every_variable_is_taken():
    assert Config.from_environment(
        {
            "SGLANG_MOONCAKE_HOST": "10.0.0.1",
            "SGLANG_MOONCAKE_REGISTER_TIMEOUT_S": "1",
            "SGLANG_MOONCAKE_LINK_TIMEOUT_S": "2",
            "SGLANG_MOONCAKE_STALL_TIMEOUT_S": "3.5",
            "SGLANG_MOONCAKE_TRANSPORTS": "tcp, samehost",
            "SGLANG_MOONCAKE_NICS": "mlx5_*,!mlx5_1",
            "SGLANG_MOONCAKE_REGISTRIES": "prefill-*, 10.0.0.0/8:8998",
            "SGLANG_MOONCAKE_STATS_DIR": "/stats",
        }
    ) == Config(
        "10.0.0.1",
        1.0,
        2.0,
        3.5,
        transports=("tcp", "samehost"),
        nics=("mlx5_*", "!mlx5_1"),
        registries=Registries(("prefill-*", "10.0.0.0/8:8998")),
        stats_dir=Path("/stats"),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LINK_TIMEOUT_S", "soon"),
        ("LINK_TIMEOUT_S", "0"),
        ("STALL_TIMEOUT_S", "-1"),
        ("STALL_TIMEOUT_S", "nan"),
        ("TRANSPORTS", "carrier pigeon"),
        ("TRANSPORTS", "tcp,tcp"),
        ("REGISTRIES", "10.0.0.1/8"),
        ("STAL_TIMEOUT_S", "1"),
    ],
)
def test_a_value_or_name_that_we_cannot_use_is_named(name, value):
    with pytest.raises(ConfigError, match=f"SGLANG_MOONCAKE_{name}"):
        Config.from_environment({f"SGLANG_MOONCAKE_{name}": value})


@pytest.mark.parametrize("name", sorted(SGLANGS_OWN))
def test_variables_of_sglang_that_begin_like_ours_do_not_stop_a_server(name):
    assert Config.from_environment({name: "1"}) == Config()


@pytest.mark.parametrize(
    ("given", "transports"),
    [
        ({"MC_FORCE_TCP": "1"}, ("tcp",)),
        ({"MOONCAKE_PROTOCOL": "tcp"}, ("tcp",)),
        ({"MOONCAKE_PROTOCOL": "TCP"}, ("tcp",)),
        ({"MC_FORCE_TCP": "0", "MOONCAKE_PROTOCOL": "rdma"}, ()),
        ({"MC_FORCE_TCP": "1", "SGLANG_MOONCAKE_TRANSPORTS": "rdma,tcp"}, ("rdma", "tcp")),
    ],
)
def test_mooncakes_wishes_for_tcp_are_heard_where_no_transport_is_named(given, transports):
    assert Config.from_environment(given).transports == transports
