# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: variables, a TOML file, Mooncake's variables, SGLang's flags."""

from __future__ import annotations

import dataclasses
import json
import string
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap_server.settings.rows import (
    Given,
    from_document,
    from_variables,
    read_values,
    to_toml,
)
from sglang_mooncake.sglang.config import Config, ConfigError, check_file
from sglang_mooncake.sglang.configuring import with_flags
from sglang_mooncake.sglang.listing import as_json, as_text, in_one_line
from sglang_mooncake.sglang.settings import BY_KEY, CONFIG_FILE, PREFIX, SETTINGS
from te.config import LIMITS, TRANSPORTS
from te.config import Config as EngineConfig

SECRET = "6f1d0c8a92e47b35b7e2f90a4c81d356"
WORDS = st.text(
    st.characters(exclude_categories=["C", "Z"], exclude_characters=","), min_size=1, max_size=12
)
NAMES = st.lists(st.text(string.ascii_letters, min_size=1), min_size=1).map(",".join)
SECONDS = st.floats(0.01, 86_400).map(repr)
SWITCHES = st.sampled_from(["0", "1"])
ADDRESSES = st.lists(
    st.builds(
        "{}:{}".format, st.sampled_from(["10.0.0.1", "[::1]", "a.svc"]), st.integers(1, 65_535)
    ),
    min_size=1,
).map(",".join)
VALUES = {
    "sglang_mooncake.host": st.ip_addresses().map(str)
    | st.from_regex(r"[a-z][a-z0-9-]{0,9}(\.[a-z][a-z0-9-]{0,9}){0,2}\.?", fullmatch=True),
    "sglang_mooncake.ports": st.tuples(st.integers(1, 999), st.integers(1000, 65_535)).map(
        lambda ends: f"{ends[0]}-{ends[1]}"
    ),
    "sglang_mooncake.registries": NAMES,
    "sglang_mooncake.registry": ADDRESSES,
    "sglang_mooncake.layerwise": SWITCHES,
    "sglang_mooncake.verify": st.sampled_from(["off", "sample", "all"]),
    "sglang_mooncake.verify_dir": WORDS,
    "sglang_mooncake.drop_in": SWITCHES,
    "sglang_mooncake.store": st.dictionaries(WORDS, WORDS | st.integers()).map(json.dumps),
    "sglang_mooncake.register_timeout_s": SECONDS,
    "sglang_mooncake.link_timeout_s": SECONDS,
    "sglang_mooncake.stats_dir": WORDS,
    "sglang_mooncake.story_rooms": st.integers(0, 65_536).map(str),
    "sglang_mooncake.secret_file": WORDS,
    "sglang_mooncake.insecure": SWITCHES,
    "te.transports": st.permutations(TRANSPORTS).map(",".join),
    "te.nics": st.lists(WORDS, min_size=1).map(",".join),
    "te.topology": WORDS,
    "te.stall_timeout_s": SECONDS,
    "te.encrypt": SWITCHES,
    "te.status_dir": WORDS | st.just("none"),
    **{
        one.key: st.integers(*LIMITS[one.name]).map(str)
        for one in SETTINGS
        if one.table == "te" and one.name in LIMITS
    },
}
TEXTS = st.fixed_dictionaries({}, optional=VALUES)


def _write(tmp_path, text, mode=0o600):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    path.chmod(mode)
    return {CONFIG_FILE: str(path)}


@pytest.mark.slow
@settings(deadline=None)
@given(TEXTS)
def test_a_file_made_of_settings_gives_the_same_settings(texts):
    wanted = {key: Given(text, "") for key, text in texts.items()}
    written = tomllib.loads(to_toml(SETTINGS, wanted))
    found, problems = from_document(SETTINGS, written, "f.toml")
    assert not problems
    assert read_values(SETTINGS, found) == read_values(SETTINGS, wanted)
    assert {key: one.where for key, one in found.items()} == {k: f"f.toml: {k}" for k in texts}


@pytest.mark.slow
@settings(deadline=None)
@given(TEXTS)
def test_variables_made_of_settings_give_the_same_settings(texts):
    environment = {BY_KEY[key].variable: text for key, text in texts.items()}
    found, problems = from_variables(SETTINGS, environment, PREFIX)
    assert not problems
    assert found == {key: Given(text, BY_KEY[key].variable) for key, text in texts.items()}
    values, problems = read_values(SETTINGS, found)
    assert not problems
    assert values.keys() == texts.keys()


def test_the_properties_have_values_for_every_setting_but_the_secret():
    assert VALUES.keys() == BY_KEY.keys() - {"sglang_mooncake.secret"}


def test_each_row_has_a_field_and_its_default():
    config, engine = Config(), EngineConfig()
    fields = {one.name for one in dataclasses.fields(Config)}
    for one in SETTINGS:
        if one.name in ("secret", "secret_file"):
            continue
        assert (one.default == "") == (one.unset != ""), one.key
        assert one.name in fields or one.table == "te", one.key
        if one.default:
            holder = config if one.name in fields else engine
            assert one.kind.read(one.default) == getattr(holder, one.name), one.key


def test_the_file_stands_between_our_variables_and_those_of_mooncake(tmp_path):
    environment = _write(
        tmp_path, "[te]\nrails = 3\ngid_index = 4\nworkers = 1\nnics = ['mlx5_1']\n"
    )
    config = Config.from_environment(
        {
            **environment,
            "SGLANG_MOONCAKE_RAILS": "5",
            "MC_GID_INDEX": "6",
            "MC_IB_TC": "7",
            "MC_TE_FILTERS": "mlx5_2",
        }
    )
    path = environment[CONFIG_FILE]
    assert config.engine == {"rails": 5, "workers": 1, "traffic_class": 7, "gid_index": 4}
    assert config.nics == ("mlx5_1",)
    assert config.nics_of_mooncake == ()
    assert {key: one.where for key, one in config.given.items()} == {
        "te.rails": "SGLANG_MOONCAKE_RAILS",
        "te.workers": f"{path}: te.workers",
        "te.gid_index": f"{path}: te.gid_index",
        "te.traffic_class": "MC_IB_TC=7",
        "te.nics": f"{path}: te.nics",
    }
    assert f"MC_GID_INDEX=6 is not used, {path}: te.gid_index=4 is" in config.courtesies


def test_of_devices_and_a_topology_the_stronger_source_has_its_way(tmp_path):
    environment = _write(tmp_path, "[te]\ntopology = '/t.json'\n")
    config = Config.from_environment({**environment, "SGLANG_MOONCAKE_NICS": "mlx5_0"})
    assert (config.topology, config.nics) == (None, ("mlx5_0",))
    environment = _write(tmp_path, "[te]\ntopology = '/t.json'\nnics = ['a']\n")
    with pytest.raises(ConfigError, match=r"te.topology is complete: .*te.nics cannot be given"):
        Config.from_environment(environment)


def test_a_secret_in_a_file_is_for_its_owner_and_group_alone(tmp_path):
    text = f"[sglang_mooncake]\nsecret = '{SECRET}'\n"
    config = Config.from_environment(_write(tmp_path, text, 0o640))
    assert config.keys
    for shown in (repr(config.given), in_one_line(config.given), as_text(config.given)):
        assert SECRET not in shown
    assert SECRET not in str(as_json(config.given)) + to_toml(SETTINGS, config.given)
    assert "sglang_mooncake.secret=(not shown)" in in_one_line(config.given)
    with pytest.raises(ConfigError, match=r"others may read .*mode 0644.*chmod 600") as refusal:
        Config.from_environment(_write(tmp_path, text, 0o644))
    assert SECRET not in str(refusal.value)
    for wrong in (f"secret = ['{SECRET}']", f"secrets = '{SECRET}'", f"secret = '{SECRET}"):
        with pytest.raises(ConfigError) as refusal:
            Config.from_environment(_write(tmp_path, f"[sglang_mooncake]\n{wrong}\n"))
        assert SECRET not in str(refusal.value)


def test_what_is_wrong_with_a_secret_value_is_said_without_it():
    secret = dataclasses.replace(BY_KEY["te.rails"], secret=True)
    values, problems = read_values([secret], {secret.key: Given("s3cret", "f.toml: te.rails")})
    assert not values
    assert problems == ["f.toml: te.rails: give a whole number from 1 to 8"]


def test_a_variable_with_the_secret_comes_before_a_file_with_another(tmp_path):
    environment = _write(tmp_path, "[sglang_mooncake]\nsecret_file = '/absent'\n")
    assert Config.from_environment({**environment, "SGLANG_MOONCAKE_SECRET": SECRET}).keys


def test_all_that_is_wrong_is_said_at_once_with_what_was_meant(tmp_path):
    environment = _write(
        tmp_path,
        "[te]\ntransports = ['rmda']\n[sglang_mooncake]\nrails = 2\nrale = 3\n"
        "[bootstrap_server]\nport = 70000\n",
    )
    path, known = environment[CONFIG_FILE], ", ".join(TRANSPORTS)
    with pytest.raises(ConfigError) as refusal:
        Config.from_environment(
            {
                **environment,
                "SGLANG_MOONCAKE_TRANSPORT": "tcp",
                "SGLANG_MOONCAKE_CONFG": "x",
                "SGLANG_MOONCAKE_ZZZZ": "x",
                "SGLANG_MOONCAKE_RAILS": "99",
            }
        )
    assert refusal.value.sentences == (
        f"{path}: sglang_mooncake.rails is not a setting: did you mean te.rails?",
        f"{path}: sglang_mooncake.rale is not a setting: did you mean te.rails?",
        f"{path}: bootstrap_server.port='70000': give a whole number from 0 to 65535",
        "SGLANG_MOONCAKE_CONFG is not a setting: did you mean SGLANG_MOONCAKE_CONFIG?",
        "SGLANG_MOONCAKE_TRANSPORT is not a setting: did you mean SGLANG_MOONCAKE_TRANSPORTS?",
        "SGLANG_MOONCAKE_ZZZZ is not a setting",
        f"{path}: te.transports='rmda': give some of {known}, each once: did you mean 'rdma'?",
        "SGLANG_MOONCAKE_RAILS='99': give a whole number from 1 to 8",
    )


def test_a_file_is_checked_for_all_programs_without_reading_what_it_names(tmp_path):
    path = _write(
        tmp_path,
        "[te]\nrails = 2\nnics = []\n[sglang_mooncake]\nsecret_file = '/absent'\n"
        "[bootstrap_server]\nport = 1\n",
    )[CONFIG_FILE]
    assert check_file(path) == 3
    with pytest.raises(ConfigError, match=r"te\.rails='9'"):
        check_file(_write(tmp_path, "[te]\nrails = 9\n")[CONFIG_FILE])


def test_the_address_may_come_from_sglang():
    config = Config.from_environment({"SGLANG_HOST_IP": "10.0.0.1"})
    assert config.host is None
    assert config.given["sglang_mooncake.host"] == Given("10.0.0.1", "SGLANG_HOST_IP")
    both = {"SGLANG_HOST_IP": "10.0.0.1", "SGLANG_MOONCAKE_HOST": "10.0.0.2"}
    config = Config.from_environment(both)
    assert config.given["sglang_mooncake.host"] == Given("10.0.0.2", "SGLANG_MOONCAKE_HOST")


FLAGS = ("--tp", "4", "--disaggregation-ib-device", "mlx5_9", "--host", "h")


@pytest.mark.parametrize(
    ("environment", "where"),
    [
        ({}, "--disaggregation-ib-device"),
        ({"MC_TE_FILTERS": "a"}, "--disaggregation-ib-device"),
        ({"SGLANG_MOONCAKE_NICS": "a"}, "SGLANG_MOONCAKE_NICS"),
        ({"SGLANG_MOONCAKE_TOPOLOGY": "/t.json"}, None),
    ],
)
def test_devices_of_sglangs_flag_stand_before_those_of_mooncake(environment, where):
    config = Config.from_environment(environment)
    found = with_flags(config.given, FLAGS, has_nics=bool(config.nics)).get("te.nics")
    assert (found and found.where) == where


def test_a_flag_without_its_value_is_an_error():
    with pytest.raises(ConfigError, match="--disaggregation-ib-device: expected one argument"):
        with_flags({}, ["--disaggregation-ib-device"], has_nics=False)


def test_the_line_of_the_log_names_what_differs_from_the_defaults():
    assert in_one_line(Config.from_environment({}).given) == "all have their defaults"
    config = Config.from_environment({f"{PREFIX}RAILS": "2", f"{PREFIX}WORKERS": "1"})
    assert in_one_line(config.given) == "te.workers=1 (SGLANG_MOONCAKE_WORKERS)"
