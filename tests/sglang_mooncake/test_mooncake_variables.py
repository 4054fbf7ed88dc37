# SPDX-License-Identifier: Apache-2.0
"""Variables of Mooncake's engine: what is taken over, what gives way, and what is said of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.transports import open_engine
from te.config import Config as EngineConfig

P = "SGLANG_MOONCAKE_"


def read(**environment: str) -> Config:
    return Config.from_environment(environment)


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("MC_GID_INDEX", "3", "gid_index"),
        ("MC_IB_TC", "106", "traffic_class"),
        ("MC_IB_SL", "5", "service_level"),
        ("MC_PKEY_INDEX", "1", "partition_key_index"),
        ("MC_IB_PKEY_INDEX", "1", "partition_key_index"),
    ],
)
def test_a_number_is_taken_over_and_said(variable, value, field):
    config = read(**{variable: value})
    assert config.engine == {field: int(value)}
    ours = f"{P}{field.upper()}={value}"
    assert config.courtesies == (f"{variable}={value} is honoured as {ours}",)


def test_what_is_automatic_for_mooncake_is_so_here():
    assert read(MC_GID_INDEX="-1", MC_IB_TC="-1") == Config()
    assert read(SGLANG_MOONCAKE_GID_INDEX="-1") == Config()
    ours = read(SGLANG_MOONCAKE_GID_INDEX="-1", MC_GID_INDEX="3")
    assert ours.engine == {}
    assert ours.courtesies == ("MC_GID_INDEX=3 is not used, SGLANG_MOONCAKE_GID_INDEX=-1 is",)
    assert EngineConfig(gid_index=-1) == EngineConfig()


def test_ours_come_first_and_it_is_said_which_was_used():
    config = read(MC_IB_TC="106", SGLANG_MOONCAKE_TRAFFIC_CLASS="96")
    assert config.engine == {"traffic_class": 96}
    assert config.courtesies == ("MC_IB_TC=106 is not used, SGLANG_MOONCAKE_TRAFFIC_CLASS=96 is",)


def test_of_two_of_mooncakes_the_one_that_it_prefers_is_used():
    config = read(MC_IB_PKEY_INDEX="1", MC_PKEY_INDEX="3")
    assert config.engine == {"partition_key_index": 3}
    assert config.courtesies[1] == "MC_IB_PKEY_INDEX=1 is not used, MC_PKEY_INDEX=3 is"
    config = read(MC_IB_PKEY_INDEX="3", MC_PKEY_INDEX="3")
    assert config.courtesies[1] == "MC_IB_PKEY_INDEX=3 says the same"


def test_what_nccl_is_told_is_not_for_us():
    assert read(NCCL_IB_GID_INDEX="3") == Config()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MC_GID_INDEX", "256"),
        ("MC_IB_TC", "high"),
        ("MC_IB_SL", "16"),
        ("MC_PKEY_INDEX", "65536"),
        ("MC_MIN_RPC_PORT", "0"),
        ("MC_MIN_PRC_PORT", "port"),
        ("MC_MAX_RPC_PORT", "70000"),
    ],
)
def test_a_value_that_cannot_be_used_is_said_and_stops_nothing(variable, value):
    """As Mooncake itself goes on without."""
    config = read(**{variable: value})
    assert config == Config(courtesies=config.courtesies)
    (note,) = config.courtesies
    assert f"={value} is not used: " in note


def test_a_range_that_is_empty_is_said_and_stops_nothing():
    config = read(MC_MIN_RPC_PORT="20000", MC_MAX_RPC_PORT="15000")
    assert config.ports == Config().ports
    assert "the first port, 20000, is above the last, 15000" in config.courtesies[0]


@pytest.mark.parametrize("value", ["1", "true", "Yes", "ON"])
def test_every_true_value_forces_tcp(value):
    assert read(MC_FORCE_TCP=value).transports == ("tcp",)


def test_filters_choose_devices_where_nothing_else_does():
    config = read(MC_TE_FILTERS="mlx5_0, mlx5_1", MC_TE_FILTERS_EXCLUDE="mlx5_7")
    assert config.nics == ()
    assert config.nics_of_mooncake == ("mlx5_0", "mlx5_1", "!mlx5_7")
    (note,) = config.courtesies
    assert note.endswith("NICS=mlx5_0,mlx5_1,!mlx5_7 where --disaggregation-ib-device names none")


@pytest.mark.parametrize(
    "other",
    [
        {"SGLANG_MOONCAKE_NICS": "mlx5_2"},
        {"SGLANG_MOONCAKE_TOPOLOGY": "/t.json"},
        {"MC_CUSTOM_TOPO_JSON": "/t.json"},
    ],
)
def test_filters_give_way_to_devices_that_are_given_otherwise(other):
    config = read(MC_TE_FILTERS="mlx5_0", **other)
    assert config.nics_of_mooncake == ()
    name, value = next(iter(other.items()))
    assert f"MC_TE_FILTERS=mlx5_0 is not used, {name}={value} is" in config.courtesies


def test_a_topology_is_taken_over_unless_ours_names_devices():
    assert read(MC_CUSTOM_TOPO_JSON="/t.json").topology == Path("/t.json")
    config = read(MC_CUSTOM_TOPO_JSON="/t.json", SGLANG_MOONCAKE_NICS="mlx5_2")
    assert (config.topology, config.nics) == (None, ("mlx5_2",))


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        ({"MC_MIN_RPC_PORT": "16000"}, (16000, 17000)),
        ({"MC_MAX_RPC_PORT": "15010"}, (15000, 15010)),
        ({"MC_MIN_RPC_PORT": "18000"}, (18000, 65535)),
        ({"MC_MIN_PRC_PORT": "20000", "MC_MAX_PRC_PORT": "20010"}, (20000, 20010)),
        ({"MC_MIN_RPC_PORT": "20000", "MC_MAX_RPC_PORT": "20010"}, (20000, 20010)),
        ({"MC_MIN_RPC_PORT": "16000", "SGLANG_MOONCAKE_PORTS": "30000-30010"}, (30000, 30010)),
    ],
)
def test_a_range_of_ports_is_taken_over(given, ports):
    assert read(**given).ports == ports


def test_what_is_set_instead_of_a_variable_is_said():
    config = read(MC_NUM_QP_PER_EP="2", MC_SLICE_SIZE="1")
    assert config.courtesies == (
        "MC_NUM_QP_PER_EP has no effect here: set SGLANG_MOONCAKE_RAILS_PER_NIC instead",
        "MC_SLICE_SIZE: no effect here",
    )


def test_variables_that_tune_what_te_does_not_have_are_named():
    config = read(MC_SLICE_SIZE="1", MC_RETRY_CNT="3", MC_FORCE_TCP="0", PATH="/bin")
    assert config == Config(
        courtesies=("MC_FORCE_TCP, MC_RETRY_CNT, MC_SLICE_SIZE: no effect here",)
    )


def test_devices_of_other_hosts_are_left_out_with_a_warning(caplog):
    """One list for a whole fleet."""
    with open_engine(read(MC_TE_FILTERS="mlx5_77"), "127.0.0.1", ()):
        pass
    assert "MC_TE_FILTERS: no RDMA device here is called mlx5_77" in caplog.text


def test_all_is_said_in_one_line_of_the_log(caplog):
    with caplog.at_level(logging.INFO, "sglang_mooncake"):
        open_engine(read(MC_FORCE_TCP="1", MC_IB_TC="106"), "127.0.0.1", ()).close()
    (line,) = [one.getMessage() for one in caplog.records if "Mooncake" in one.getMessage()]
    assert line == (
        "variables of Mooncake's engine: MC_IB_TC=106 is honoured as SGLANG_MOONCAKE_TRAFFIC_CLASS"
        "=106; MC_FORCE_TCP=1 is honoured as SGLANG_MOONCAKE_TRANSPORTS=tcp"
    )
