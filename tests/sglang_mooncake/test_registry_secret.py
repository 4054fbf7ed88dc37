# SPDX-License-Identifier: Apache-2.0
"""What asks a registry, with a secret and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from handover import ALONE, FIRST, WAIT_S, handover, until

from bootstrap_server import (
    BootstrapClient,
    InstanceConfig,
    KVFormat,
    NeverServed,
    Rank,
    RankLease,
    RankRecord,
    Why,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.fetching import fetch_instance
from sglang_mooncake.messages import PROTOCOL_VERSION
from sglang_mooncake.sglang import registry
from sglang_mooncake.sglang.config import ConfigError
from sglang_mooncake.sglang.registry import ServersRegistry, query_dp_ranks

SECRET = "6f1d0c8a92e47b35b7e2f90a4c81d356"
KEYS = Keys.from_secrets([SECRET.encode()])


@pytest.fixture(params=[False, True], ids=["open", "secret"])
def keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Also set for what reads the environment."""
    monkeypatch.delenv("SGLANG_MOONCAKE_SECRET_FILE", raising=False)
    monkeypatch.delenv("SGLANG_MOONCAKE_SECRET", raising=False)
    if request.param:
        monkeypatch.setenv("SGLANG_MOONCAKE_SECRET", SECRET)
    return KEYS if request.param else Keys()


@pytest.fixture
def address(keys: Keys) -> Iterator[str]:
    with ServersRegistry(host="127.0.0.1", port=0) as server:
        yield f"127.0.0.1:{server.port}"


def test_decode_ranks_find_instances_and_dp_ranks(address: str, keys: Keys) -> None:
    config = InstanceConfig(topology=ALONE, format=KVFormat(1, "bfloat16", None))
    record = signed(RankRecord(config, Rank(FIRST, "127.0.0.1", 1, 1)), keys.record)
    with (
        RankLease(address, record, keys=keys.registry),
        BootstrapClient(address, WAIT_S, keys=keys.registry) as client,
    ):
        assert fetch_instance(address, keys).ranks == (record.rank,)
        client.register_dp_rank(7, 0)
        assert query_dp_ranks(address, [7, 8], keys.registry) == {"7": 0}


@pytest.mark.parametrize("signer", [(), (b"x" * 32,)], ids=["unsigned", "other key"])
def test_a_registry_that_was_taken_over_leads_nobody_elsewhere(
    signer: tuple[bytes, ...], monkeypatch
) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SECRET", SECRET)
    config = InstanceConfig(topology=ALONE, format=KVFormat(1, "bfloat16", None))
    record = signed(RankRecord(config, Rank(FIRST, "10.6.6.6", 666, 1)), signer)
    with ServersRegistry(host="127.0.0.1", port=0) as server:
        address = f"127.0.0.1:{server.port}"
        with (
            RankLease(address, record, keys=KEYS.registry),
            pytest.raises(NeverServed, match=r"at 10\.6\.6\.6 port 666 is not asked") as caught,
        ):
            fetch_instance(address, KEYS)
        assert f"from the registry at {address}, is" in str(caught.value)


def test_a_record_that_another_release_has_signed_names_the_releases(monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SECRET", SECRET)
    config = InstanceConfig(ALONE, KVFormat(1, "bfloat16"), protocol=PROTOCOL_VERSION + 1)
    record = signed(RankRecord(config, Rank(FIRST, "10.0.0.1", 1, 1)), (b"otherwise" * 4,))
    with ServersRegistry(host="127.0.0.1", port=0) as server:
        address = f"127.0.0.1:{server.port}"
        with (
            RankLease(address, record, keys=KEYS.registry),
            pytest.raises(NeverServed) as caught,
        ):
            fetch_instance(address, KEYS, protocol=PROTOCOL_VERSION)
    assert caught.value.why is Why.RELEASE
    for version in (PROTOCOL_VERSION, PROTOCOL_VERSION + 1):
        assert f"version {version}" in str(caught.value)


def test_ranks_with_a_secret_find_each_other() -> None:
    with handover(keys=KEYS) as pair:
        pair.decode.know(pair.address)
        pair.complete(1, [0, 1], [2, 3], aux=0)
        pair.prefill.side.open_room(2, register_dp_rank=True)
        until(lambda: query_dp_ranks(pair.address, [2], KEYS.registry) == {"2": 0}, "it is told")


def test_strangers_find_nothing(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SECRET", SECRET)
    with ServersRegistry(host="127.0.0.1", port=0) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(NeverServed, match="serves only SGLang servers that have its secret"):
            fetch_instance(address)
        assert query_dp_ranks(address, [7], ()) == {}
        assert "cannot ask for the DP ranks of 1 rooms" in caplog.text


def test_it_does_not_open_to_the_internet_for_as_long_as_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "addresses_behind", lambda _: ("10.0.0.5", "192.88.99.1"))
    with pytest.raises(ValueError, match="192"):
        ServersRegistry(host="0.0.0.0", port=0)
    monkeypatch.setenv("SGLANG_MOONCAKE_INSECURE", "1")
    ServersRegistry(host="0.0.0.0", port=0).close()


def test_a_bad_secret_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_SECRET", "short")
    with pytest.raises(ConfigError, match="SGLANG_MOONCAKE_SECRET: the secret has 5 characters"):
        ServersRegistry(host="127.0.0.1", port=0)
