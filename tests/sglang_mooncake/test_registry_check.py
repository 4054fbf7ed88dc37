# SPDX-License-Identifier: Apache-2.0
"""A decode server says from its start on which of the registries and servers that it was told of do
not fit, without a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from handover import ALONE, FIRST, HOST, NEVER_S, WAIT_S, until
from msgspec.structs import replace

from bootstrap_server import (
    BootstrapServer,
    Instance,
    InstanceConfig,
    KVFormat,
    NeverServed,
    Rank,
    RankLease,
    RankRecord,
    Unreachable,
    Why,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import signed
from bootstrap_server.ranks import matching
from sglang_mooncake.messages import PROTOCOL_VERSION
from sglang_mooncake.registry_check import RegistryCheck, news

OURS, THEIRS = (Keys.from_secrets([text * 43]) for text in (b"a", b"b"))
CONFIG = InstanceConfig(ALONE, KVFormat(16, "bfloat16"), protocol=PROTOCOL_VERSION, model="A")
NAME = "10.0.0.1-8998"


def fits(instance: Instance) -> None:
    matching.check_configs(instance.config, CONFIG)


@contextmanager
def registered(registry: BootstrapServer, config: InstanceConfig, keys: Keys) -> Iterator[None]:
    rank = Rank(FIRST, HOST, 9, epoch=1)
    record = signed(RankRecord(config, rank), keys.record, NAME)
    with RankLease(
        f"{HOST}:{registry.port}", record, instance=NAME, deadline_s=WAIT_S, keys=keys.registry
    ):
        yield


def check(registry: BootstrapServer, keys: Keys) -> RegistryCheck:
    return RegistryCheck([f"{HOST}:{registry.port}"], keys, PROTOCOL_VERSION, fits)


def test_a_registry_with_another_secret_is_named_once(caplog):
    with BootstrapServer(HOST, 0, NEVER_S, keys=THEIRS.registry) as registry:
        checked = check(registry, OURS)
        checked.look()
        checked.look()
    assert caplog.text.count(f"the registry {HOST}:{registry.port} does not serve this") == 1
    assert "another secret" in caplog.text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "B"}, "model is B on prefill and A on decode"),
        ({"format": KVFormat(1, "bfloat16")}, "page_size is 1 on prefill and 16"),
        ({"format": KVFormat(16, "float32")}, "kv_cache_dtype is float32 on prefill"),
        ({"format": KVFormat(16, "bfloat16", "5d")}, "kv_layout is 5d on prefill"),
        ({"protocol": PROTOCOL_VERSION + 1}, f"{PROTOCOL_VERSION + 1} on prefill and"),
    ],
)
def test_a_server_that_does_not_fit_is_named_and_when_it_is_mended(changed, said, caplog):
    with BootstrapServer(HOST, 0, NEVER_S, keys=OURS.registry) as registry:
        checked = check(registry, OURS)
        with registered(registry, replace(CONFIG, **changed), OURS):
            checked.look()
            checked.look()
        assert caplog.text.count(f"the prefill server {NAME} at the registry") == 1
        assert said in caplog.text
        with registered(registry, CONFIG, OURS):
            checked.look()
        assert f"{NAME} at the registry {HOST}:{registry.port} fits this server now" in caplog.text


def test_a_record_of_a_server_with_another_secret_is_named(caplog):
    """The registry has none, and takes everybody."""
    with BootstrapServer(HOST, 0, NEVER_S) as registry:
        rank = Rank(FIRST, HOST, 9, epoch=1)
        record = signed(RankRecord(CONFIG, rank), THEIRS.record, NAME)
        with RankLease(f"{HOST}:{registry.port}", record, instance=NAME, deadline_s=WAIT_S):
            check(registry, OURS).look()
    assert "does not prove that it has our secret" in caplog.text


def test_a_registry_that_is_away_is_asked_again(caplog):
    with BootstrapServer(HOST, 0, NEVER_S) as registry:
        address = f"{HOST}:{registry.port}"
    checked = RegistryCheck([address], OURS, PROTOCOL_VERSION, fits)
    checked.look()
    assert not caplog.records


def test_it_looks_by_itself_and_ends(caplog):
    with BootstrapServer(HOST, 0, NEVER_S, keys=THEIRS.registry) as registry:
        checked = check(registry, OURS)
        checked.start()
        until(lambda: "does not serve this server" in caplog.text, "it has looked")
        checked.close()


def test_who_has_gone_fits_no_better():
    assert news({"a": "no", "b": "no", "c": "no"}, {"b": "no", "d": "no"}, {"a", "b", "d"}) == (
        ["no"],
        ["a"],
    )
    assert news({"a": "no"}, {"a": "never"}, {"a"}) == (["never"], [])


def test_a_registry_that_is_away_keeps_its_own_problems_alone(caplog, monkeypatch):
    """One address may begin as another one does."""
    short, long = "10.0.0.1:89", "10.0.0.1:8998"
    away = NeverServed("another secret", Why.SECRET)
    told = {short: away, long: away}

    def names(_: RegistryCheck, address: str) -> dict[str, int]:
        if told[address] is not None:
            raise told[address]
        return {}

    monkeypatch.setattr(RegistryCheck, "_names", names)
    checked = RegistryCheck([short, long], OURS, PROTOCOL_VERSION, fits)
    checked.look()
    told |= {short: Unreachable("no answer"), long: None}
    checked.look()
    assert f"the registry {long} fits this server now" in caplog.text
    assert f"the registry {short} fits this server now" not in caplog.text
    told[short] = None
    checked.look()
    assert f"the registry {short} fits this server now" in caplog.text
