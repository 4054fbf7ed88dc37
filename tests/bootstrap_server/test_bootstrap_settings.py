# SPDX-License-Identifier: Apache-2.0
"""Settings as rows of a table: values, the TOML file, and those of the registry's process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bootstrap_server import StatusPage
from bootstrap_server.settings.file import FILE_BYTES_MAX, read_settings_file
from bootstrap_server.settings.server import SETTINGS, Config
from bootstrap_server.settings.values import ConfigError, address, names_of

_GIVEN = """
[te]
what = "te knows"
[bootstrap_server]
host = "10.0.0.1"
port = 0
lease_s = 2.5
log_level = "info"
secret_file = "/etc/secret"
insecure = true
status_page = "off"
"""


def _file(tmp_path, text, mode=0o644):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_gives_every_setting_and_an_argument_comes_first(tmp_path):
    path = _file(tmp_path, _GIVEN)
    config = Config.from_arguments(["--config", str(path), "--port", "8999"])
    assert (config.host, config.port, config.lease_s) == ("10.0.0.1", 8999, 2.5)
    assert (config.log_level, str(config.secret_file)) == ("info", "/etc/secret")
    assert config.insecure
    assert config.status_page is StatusPage.OFF


def test_without_arguments_the_defaults_are_those_of_the_table():
    assert Config.from_arguments([]) == Config()
    given = [word for one in SETTINGS if one.default not in ("", "0") for word in _argument(one)]
    assert Config.from_arguments(given) == Config()


def _argument(setting):
    return setting.argument, setting.default


def test_a_switch_is_an_argument_without_a_value():
    assert Config.from_arguments(["--insecure"]).insecure


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[bootstrap_server]\nprot = 1", "bootstrap_server.prot is not a setting: did you mean"),
        ("[boostrap_server]", "boostrap_server is not a table of settings: did you mean bootstrap"),
        ("[unlike]", "unlike is not a table of settings$"),
        ("port = 1", "port is not a table of settings: did you mean bootstrap_server.port?"),
        ("bootstrap_server = 1", r"bootstrap_server is a table: write \[bootstrap_server\]"),
        ("[bootstrap_server]\nport = '1'", "bootstrap_server.port = '1': give a whole number"),
        ("[bootstrap_server]\nport = true", "bootstrap_server.port = True: give a whole number"),
        ("[bootstrap_server]\nport = 65536", "port='65536': give a whole number from 0 to 65535"),
        ("[bootstrap_server]\ninsecure = 1", "insecure = 1: give true or false"),
        ("[bootstrap_server]\nlog_level = 'wraning'", "one of .*: did you mean 'warning'?"),
        ("[bootstrap_server]\nhost = ''", "host = '': give a value, or leave it out"),
        ('[bootstrap_server]\nhost = "a\\nb"', "give printable characters alone"),
        ("[bootstrap_server]\nlease_s = nan", "lease_s='nan': give seconds between 0.01 and"),
        ("port", "is not TOML: "),
        ("a = " + "[" * 5000, "is not TOML: "),
        ("#" * (FILE_BYTES_MAX + 1), f"it has more than {FILE_BYTES_MAX} bytes"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path, text, sentence):
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError, match=f"{path}.*{sentence}"):
        Config.from_arguments(["--config", str(path)])


def test_a_list_in_a_file_holds_names_without_commas():
    kind = names_of("names")
    assert kind.read(kind.from_toml(["a", "b"])) == ("a", "b")
    for wrong in (["a,b"], [1], "a"):
        with pytest.raises(ValueError, match="give a list of strings"):
            kind.from_toml(wrong)


def test_a_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "settings.toml"
    with pytest.raises(ConfigError, match=f"cannot read settings from {path}: No such file"):
        read_settings_file(path, SETTINGS)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"cannot read settings from {path}: it is no regular"):
        read_settings_file(path, SETTINGS)
    path.unlink()
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=f"{path} is not TOML: it is not UTF-8"):
        read_settings_file(path, SETTINGS)


def _refused(*arguments):
    argv = [sys.executable, "-m", "bootstrap_server", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert not done.stdout
    return done.stderr


@pytest.mark.slow
def test_the_command_says_all_that_is_wrong_and_what_was_meant():
    assert _refused("--port", "99999", "--log-level", "inf").splitlines() == [
        "error: --port='99999': give a whole number from 0 to 65535",
        "error: --log-level='inf': give one of debug, info, warning, error: did you mean 'info'?",
    ]
    assert "--prot 1: did you mean '--port'?" in _refused("--prot", "1")


@pytest.mark.parametrize(
    "given",
    [
        "10.0.0.1", "::1", "fd00::1", "fe80::1%eth0", "0.0.0.0", "localhost", "prefill-0.svc",
        "node7.example.org.", "my_host", "123456789012", "3com.example", "b\u00fccher",
    ],
)  # fmt: skip
def test_a_host_is_an_address_or_a_name(given):
    assert address().read(given) == given


@pytest.mark.parametrize(
    "given",
    [
        "10.0.0.", "10.0.0", "10.0.0.256", "7", "", " ", "a..b", ".a", "a b", "a:80", "[::1]",
        "http://a", "-a", "a" * 64, "fd00::1::2", "10.0.0.1.",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused_with_what_to_give(given):
    with pytest.raises(ValueError, match=r"give an address such as 10\.0\.0\.1 or fd00::1, or"):
        address().read(given)
