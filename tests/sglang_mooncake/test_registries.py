# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from sglang_mooncake.registries import Registries


@pytest.mark.parametrize(
    ("pattern", "host", "port", "allowed"),
    [
        ("10.0.0.1", "10.0.0.1", 8998, True),
        ("10.0.0.1", "10.0.0.2", 8998, False),
        ("10.0.0.1:8998", "10.0.0.1", 8998, True),
        ("10.0.0.1:8998", "10.0.0.1", 8999, False),
        ("10.0.0.1:*", "10.0.0.1", 1, True),
        ("10.0.0.*", "10.0.0.77", 8998, True),
        ("10.0.0.*", "10.0.0.1.example.com", 8998, False),
        ("prefill-?.svc.example", "prefill-3.svc.example", 8998, True),
        ("prefill-?.svc.example", "PREFILL-3.svc.example", 8998, True),
        ("prefill-?.svc.example", "prefill-31.svc.example", 8998, False),
        ("10.1.0.0/16", "10.1.200.3", 8998, True),
        ("10.1.0.0/16", "10.2.0.1", 8998, False),
        ("10.1.0.0/16", "prefill", 8998, False),
        ("10.1.0.0/16:8998", "10.1.0.1", 1, False),
        ("fd00::1", "fd00::1", 8998, True),
        ("[fd00::1]:8998", "fd00::1", 8998, True),
        ("[fd00::1]:8998", "fd00::1", 8999, False),
        ("fd00::/8", "fd12::1", 8998, True),
    ],
)
def test_a_pattern_allows_what_it_describes(pattern, host, port, allowed):
    assert Registries((pattern,)).allows(host, port) is allowed
    assert Registries(("elsewhere", pattern)).allows(host, port) is allowed


def test_no_pattern_allows_all():
    assert Registries().allows("anywhere.example", 1)


@pytest.mark.parametrize("text", ["", ":8998", "a b", "host:0", "host:65536", "10.0.0.1/8", "a@b"])
def test_what_is_no_pattern_is_named(text):
    with pytest.raises(ValueError, match=r"is no network|is not of the form") as caught:
        Registries((text,))
    assert repr(text) in str(caught.value)
