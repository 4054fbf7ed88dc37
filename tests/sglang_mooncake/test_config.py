# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from te_ports import two_ports

from bootstrap_server.admission.secret import Keys
from sglang_mooncake.registries import Registries
from sglang_mooncake.sglang.config import SGLANGS_OWN, Config, ConfigError
from sglang_mooncake.sglang.transports import open_engine
from te.status import default_directory


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
            "SGLANG_MOONCAKE_LAYERWISE": "1",
            "SGLANG_MOONCAKE_VERIFY": "all",
            "SGLANG_MOONCAKE_VERIFY_DIR": "/kept",
            "SGLANG_MOONCAKE_STATS_DIR": "/stats",
            "SGLANG_MOONCAKE_STATUS_DIR": "/status",
            "SGLANG_MOONCAKE_STORY_ROOMS": "7",
            "SGLANG_MOONCAKE_PORTS": "20000-20100",
            "SGLANG_MOONCAKE_RAILS": "4",
            "SGLANG_MOONCAKE_RAILS_PER_NIC": "2",
            "SGLANG_MOONCAKE_WORKERS": "3",
            "SGLANG_MOONCAKE_TRAFFIC_CLASS": "106",
            "SGLANG_MOONCAKE_SERVICE_LEVEL": "3",
            "SGLANG_MOONCAKE_PARTITION_KEY_INDEX": "1",
            "SGLANG_MOONCAKE_GID_INDEX": "3",
        }
    ) == Config(
        "10.0.0.1",
        1.0,
        2.0,
        3.5,
        transports=("tcp", "samehost"),
        nics=("mlx5_*", "!mlx5_1"),
        registries=Registries(("prefill-*", "10.0.0.0/8:8998")),
        layerwise=True,
        verify="all",
        verify_dir=Path("/kept"),
        stats_dir=Path("/stats"),
        status_dir=Path("/status"),
        story_rooms=7,
        ports=(20000, 20100),
        engine={
            "rails": 4,
            "rails_per_nic": 2,
            "workers": 3,
            "traffic_class": 106,
            "service_level": 3,
            "partition_key_index": 1,
            "gid_index": 3,
        },
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
        ("LAYERWISE", "yes"),
        ("RAILS", "9"),
        ("RAILS_PER_NIC", "0"),
        ("WORKERS", "5"),
        ("TRAFFIC_CLASS", "256"),
        ("SERVICE_LEVEL", "low"),
        ("PARTITION_KEY_INDEX", "-1"),
        ("GID_INDEX", "256"),
        ("PORTS", "20000"),
        ("PORTS", "20100-20000"),
        ("PORTS", "0-20"),
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


def test_every_setting_reaches_the_engine():
    """Each by the name that te.Config has for it."""
    with two_ports(0) as first:
        given = dict.fromkeys(("RAILS", "RAILS_PER_NIC", "WORKERS", "TRAFFIC_CLASS"), "2")
        given |= dict.fromkeys(("SERVICE_LEVEL", "PARTITION_KEY_INDEX", "GID_INDEX"), "2")
        given |= {"PORTS": f"{first}-{first + 1}", "TRANSPORTS": "tcp"}
        environment = {f"SGLANG_MOONCAKE_{name}": value for name, value in given.items()}
        with open_engine(Config.from_environment(environment), "127.0.0.1", ()) as engine:
            config = engine._config
            assert (config.port, config.port_last) == (first, first + 1)
            fields = [name.lower() for name, value in given.items() if value == "2"]
            assert [getattr(config, name) for name in fields] == [2] * 7


SECRET, OTHER = "6f1d0c8a92e47b35b7e2f90a4c81d356", "c03be5a71f8d24969d47e2a0f5b8136c"


def test_secrets_become_keys_and_show_nowhere(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n{OTHER}\n")
    path.chmod(0o600)
    of_file = Config.from_environment({"SGLANG_MOONCAKE_SECRET_FILE": str(path)})
    of_text = Config.from_environment({"SGLANG_MOONCAKE_SECRET": f"{SECRET}\n{OTHER}"})
    assert of_file == of_text
    assert of_file.keys == Keys.from_secrets([SECRET.encode(), OTHER.encode()])
    assert repr(of_file) == repr(Config.from_environment({}))


def test_to_encrypt_takes_a_secret():
    with pytest.raises(ConfigError, match="SGLANG_MOONCAKE_ENCRYPT=1 needs a secret"):
        Config.from_environment({"SGLANG_MOONCAKE_ENCRYPT": "1"})
    given = {"SGLANG_MOONCAKE_ENCRYPT": "1", "SGLANG_MOONCAKE_SECRET": SECRET}
    assert Config.from_environment(given).encrypt


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"SECRET": "short"}, "SECRET: the secret has 5 characters"),
        ({"SECRET": ""}, "SECRET: there is no secret in it"),
        ({"SECRET_FILE": "/absent"}, "SECRET_FILE: cannot read the secret from /absent"),
        ({"SECRET_FILE": ""}, "SECRET_FILE: cannot read"),
        ({"SECRET": SECRET, "SECRET_FILE": "/absent"}, "are both set"),
    ],
)
def test_a_secret_that_we_cannot_use_stops_the_server(given, sentence):
    with pytest.raises(ConfigError, match=f"SGLANG_MOONCAKE_.*{sentence}") as refusal:
        Config.from_environment({f"SGLANG_MOONCAKE_{name}": text for name, text in given.items()})
    assert SECRET not in str(refusal.value)


def test_status_sockets_can_be_switched_off():
    assert Config.from_environment({"SGLANG_MOONCAKE_STATUS_DIR": "none"}).status_dir is None
    assert Config.from_environment({}).status_dir == default_directory()
    with pytest.raises(ConfigError, match="SGLANG_MOONCAKE_STORY_ROOMS='65537': give a whole"):
        Config.from_environment({"SGLANG_MOONCAKE_STORY_ROOMS": "65537"})
