# SPDX-License-Identifier: Apache-2.0
"""What servers without a secret say, and where they do not start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bootstrap_server.admission.exposure import exposure
from bootstrap_server.admission.own_addresses import addresses_behind, local_ipv4, local_ipv6

#: Of a range that is not routed, but counts as public (RFC 7526: it was for relays to IPv6).
PUBLIC = "192.88.99.1"


def said(host: str, has_secret: bool = False, is_insecure: bool = False):
    return exposure(host, has_secret, is_insecure, "--insecure")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_nothing_is_said_of_addresses_that_nobody_else_reaches(host):
    assert said(host) is None


@pytest.mark.parametrize("host", ["10.0.0.5", PUBLIC, "::1", "some-host"])
def test_nothing_is_said_with_a_secret(host):
    assert said(host, has_secret=True) is None


@pytest.mark.parametrize(
    "host",
    ["10.0.0.5", "192.168.1.9", "100.64.3.3", "fd12::1", "fe80::1%eth0", "0.0.0.0", "node-7"],
)
def test_private_addresses_are_warned_of(host):
    found = said(host)
    assert not found.refused
    assert f"no secret is set: whoever can reach {host} can read" in found.sentence
    assert "sglang-mooncake secret" in found.sentence


@pytest.mark.parametrize("host", [PUBLIC, "8.8.8.8", "2a00:1450::1"])
def test_public_addresses_are_refused_unless_somebody_insists(host):
    found = said(host)
    assert found.refused
    assert f"{host} is a public address" in found.sentence
    assert "start with --insecure" in found.sentence
    insisted = said(host, is_insecure=True)
    assert not insisted.refused
    assert f"{host} is a public address" in insisted.sentence


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "node-7"])
def test_a_public_address_behind_a_word_or_a_name_counts(host):
    behind = ("127.0.0.1", "10.0.0.5", PUBLIC)
    found = exposure(host, False, False, "--insecure", behind)
    assert found.refused
    assert f"{host} is a public address ({PUBLIC}, one of this host's)" in found.sentence
    assert not exposure(host, False, False, "--insecure", behind[:2]).refused
    assert exposure(host, False, False, "--insecure", behind[:1]) is None


FIB = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
     |-- 198.51.100.0
        /24 link UNICAST
     |-- 198.51.100.7
        /32 host LOCAL
     |-- 198.51.100.255
        /32 link BROADCAST
Local:
     |-- 198.51.100.7
        /32 host LOCAL
"""


def test_addresses_are_read_out_of_the_kernels_tables():
    assert local_ipv4(FIB) == ("127.0.0.1", "198.51.100.7")
    table = (
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n" + "0" * 31 + "1 01 80 10 80 lo\n"
    )
    assert local_ipv6(table) == ("fe80::fc:ff:fe00:1", "::1")


def test_this_hosts_addresses_are_behind_the_words_for_all_of_them():
    assert "127.0.0.1" in addresses_behind("0.0.0.0")
    assert "127.0.0.1" in addresses_behind("::")
    assert "127.0.0.1" in addresses_behind("localhost")
    assert addresses_behind("10.2.3.4") == ("10.2.3.4",)
    assert addresses_behind("no-such-host.invalid") == ()


def registry(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bootstrap_server", "--host", PUBLIC, "--port", "0", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_registry_does_not_start_on_a_public_address():
    done = registry()
    assert done.returncode == 1
    assert f"error: no secret is set, and {PUBLIC} is a public address" in done.stderr


@pytest.mark.slow
def test_with_insecure_it_tries_to():
    done = registry("--insecure")
    assert done.returncode == 1
    assert "is a public address" in done.stderr
    assert "cannot listen" in done.stderr, "the machine has no such address"
