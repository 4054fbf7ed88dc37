# SPDX-License-Identifier: Apache-2.0
"""The installed SGLang against our plug-in, and what we ask it of a server."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest
from cpu_serving.nursery import Nursery
from cpu_serving.servers import base_environment

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


def test_the_plugin_takes_over_mooncake_and_leaves_the_others(monkeypatch):
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins import load_plugins

    from sglang_mooncake.sglang.plugin import serving_classes

    load_plugins()
    for kind, cls in serving_classes().items():
        taken = utils.get_kv_class(utils.TransferBackend.MOONCAKE, utils.KVClassType(kind))
        assert taken is cls
    fake = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert fake.__module__.startswith("sglang.")
    kv_args = utils.get_kv_class(utils.TransferBackend.MOONCAKE, utils.KVClassType.KVARGS)
    assert kv_args.__module__.startswith("sglang.")


NULL_MOE = SimpleNamespace(
    enable_elastic_expert_backup=False, elastic_ep_backend=None, mooncake_ib_device=None
)
NULL_MEMORY = SimpleNamespace(enable_hierarchical_cache=False, hicache_storage_backend=None)


@pytest.mark.parametrize(
    ("disagg", "memory", "moe", "made"),
    [
        ({}, {}, {}, False),
        ({"encoder_only": True, "encoder_transfer_backend": "mooncake"}, {}, {}, True),
        ({"language_only": True, "encoder_transfer_backend": "mooncake"}, {}, {}, True),
        ({}, {"enable_hierarchical_cache": True, "hicache_storage_backend": "mooncake"}, {}, True),
        ({}, {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, {}, False),
        (
            {},
            {},
            {"enable_elastic_expert_backup": True, "elastic_ep_backend": "nixl"},
            True,
        ),
    ],
    ids=["PD", "encoder", "language", "HiCache in Mooncake", "HiCache in files", "expert backup"],
)
def test_mooncakes_own_engine_is_made_for_whoever_else_wants_it(
    monkeypatch, disagg, memory, moe, made
):
    """On a PD server with the backend mooncake, by SGLang's own conditions."""
    from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as module
    from sglang.srt.plugins import load_plugins

    load_plugins()
    pd = {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_ib_device": "mlx5_7",
        "encoder_only": False,
        "language_only": False,
        "encoder_transfer_backend": None,
    }
    asked: list[str] = []
    monkeypatch.setattr(module, "get_disagg", lambda: SimpleNamespace(**pd | disagg))
    monkeypatch.setattr(module, "get_memory", lambda: SimpleNamespace(**vars(NULL_MEMORY) | memory))
    merged = SimpleNamespace(moe=SimpleNamespace(**vars(NULL_MOE) | moe))
    monkeypatch.setattr(module, "get_exec", lambda: merged)
    monkeypatch.setattr(
        module, "init_mooncake_transfer_engine", lambda **given: asked.append(given["ib_device"])
    )
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    before = module.get_disagg
    module.maybe_init_shared_mooncake_transfer_engine(gpu_id=0)
    assert asked == ["mlx5_7"] * made
    assert module.get_disagg is before


def test_elastic_ep_is_given_mooncakes_own_engine(monkeypatch):
    """Not ours, whatever the backend of PD."""
    from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as module
    from sglang.srt.plugins import load_plugins

    load_plugins()
    theirs, given = object(), []
    disagg = SimpleNamespace(
        disaggregation_mode="decode",
        disaggregation_transfer_backend="mooncake",
        disaggregation_ib_device=None,
        encoder_only=False,
        language_only=False,
    )
    moe = SimpleNamespace(
        enable_elastic_expert_backup=False, elastic_ep_backend="mooncake", mooncake_ib_device="m0"
    )
    asked: list[str] = []

    def init(**wanted):
        asked.append(wanted["ib_device"])
        monkeypatch.setattr(module, "_mooncake_transfer_engine", SimpleNamespace(engine=theirs))

    monkeypatch.setattr(module, "get_disagg", lambda: disagg)
    monkeypatch.setattr(module, "get_memory", lambda: NULL_MEMORY)
    monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(moe=moe))
    monkeypatch.setattr(module, "init_mooncake_transfer_engine", init)
    monkeypatch.setattr(module, "_mooncake_transfer_engine", None)
    monkeypatch.setitem(
        sys.modules, "mooncake.pg", SimpleNamespace(set_transfer_engine=given.append)
    )
    monkeypatch.setenv("SGLANG_HOST_IP", "127.0.0.1")
    module.maybe_init_shared_mooncake_transfer_engine(gpu_id=0)
    assert (asked, given) == (["m0"], [theirs])


def test_no_mooncake_package_is_installed():
    names = {str(d.metadata["Name"]).lower() for d in distributions()}
    assert not {name for name in names if name.startswith("mooncake")}
    assert importlib.util.find_spec("mooncake") is None


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Processes in which SGLang is imported and no plugin is loaded."""
    log = tmp_path_factory.mktemp("nursery") / "nursery.log"
    preload = ["sglang.srt.plugins", "sglang.srt.disaggregation.utils"]
    with Nursery(base_environment(), log, preload=preload) as made:
        yield made


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("import sglang.srt.disaggregation.utils as u; del u.get_kv_class", "has no sglang"),
        ("import sys; sys.modules['te'] = None", "Traceback"),
        (
            "import os; os.environ['SGLANG_MOONCAKE_NISC'] = 'x'",
            "sglang-mooncake: SGLANG_MOONCAKE_NISC",
        ),
    ],
)
@pytest.mark.timeout(500)
def test_a_plugin_that_cannot_take_over_stops_the_process(broken, says, nursery, tmp_path):
    load = "from sglang.srt.plugins import load_plugins; load_plugins(); print('still running')"
    (tmp_path / "broken.py").write_text(f"{broken}\n{load}\n")
    env, log = base_environment(), tmp_path / "log"
    # The nursery imports SGLang, which took 100 s beside servers of 25 busy threads.
    env["PYTHONPATH"] += f":{tmp_path}"
    ended = nursery.start("broken", [], env, log)
    code, said = ended.wait(400), log.read_text()
    assert code == 70, said[-2000:]
    assert "still running" not in said
    assert says in said
    assert "The server stops here" in said
    assert ("Traceback" in said) == (says == "Traceback"), "foreseen: a sentence says all"


def test_a_server_is_refused_by_what_sglang_says_of_it(monkeypatch):
    """Each fact that `supported.refusal` asks for comes from where SGLang has it."""
    from sglang_mooncake.sglang import seam
    from sglang_mooncake.sglang.supported import Modes

    parallel = SimpleNamespace(
        enable_cp_tp_group_sharing=True, attn_dcp_size=4, enable_kv_cache_sharding=True
    )
    disagg = SimpleNamespace(disaggregation_decode_allocation_policy="prefill_complete")
    monkeypatch.setattr(seam, "get_parallel", lambda: parallel)
    monkeypatch.setattr(seam, "get_disagg", lambda: disagg)
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    kv_args = SimpleNamespace(state_types=["swa"])
    facts = seam._modes(kv_args, seam.DisaggregationMode.DECODE, has_draft_heads=True)
    everything = Modes("decode", "prefill_complete", 4, *[True] * 4, states=("swa",))
    assert facts == everything
    with pytest.raises(seam.UnsupportedServer, match="does not serve"):
        seam.check_supported(kv_args, seam.DisaggregationMode.DECODE, has_draft_heads=True)


@pytest.mark.parametrize(
    ("cp_size", "group", "dealt"), [(1, "attn_tp_group", (2, 4)), (2, "attn_cp_group", (1, 2))]
)
def test_how_a_cache_is_split_is_what_sglang_says(monkeypatch, cp_size, group, dealt):
    from sglang.srt.mem_cache import page_interleave

    from sglang_mooncake.layout import Dealt, Split
    from sglang_mooncake.sglang import seam

    groups = {
        "attn_tp_group": SimpleNamespace(rank_in_group=2, world_size=4),
        "attn_cp_group": SimpleNamespace(rank_in_group=1, world_size=cp_size),
    }
    assert (groups[group].rank_in_group, groups[group].world_size) == dealt
    parallel = SimpleNamespace(
        **groups,
        enable_kv_cache_sharding=True,
        enable_cp_tp_group_sharing=True,
        attn_dcp_rank=3,
        attn_dcp_size=4,
    )
    monkeypatch.setattr(seam, "get_parallel", lambda: parallel)
    monkeypatch.setattr(page_interleave, "get_parallel", lambda: parallel)
    monkeypatch.setattr(seam, "get_memory", lambda: SimpleNamespace(enable_hisparse=True))
    assert seam._split("decode") == Split(Dealt(*dealt), Dealt(3, 4), True, True)
    assert seam._split("prefill").on_host is False, "its own pages are on the device"


def test_ranks_that_share_the_cp_and_the_tp_group_stand_as_tp_ranks(monkeypatch):
    """As SGLang registers them (CommonKVManager.register_to_bootstrap)."""
    from bootstrap_server import RankCoords, Topology
    from sglang_mooncake.sglang import seam

    parallel = SimpleNamespace(
        attn_tp_size=1, attn_tp_rank=0, attn_cp_size=4, attn_cp_rank=3, attn_dp_size=1,
        attn_dp_rank=0, pp_size=1, dp_size=1, num_dp_ranks=1, enable_cp_tp_group_sharing=True,
    )  # fmt: skip
    monkeypatch.setattr(seam, "get_parallel", lambda: parallel)
    place = seam._place(SimpleNamespace(pp_rank=0, system_dp_rank=None))
    assert place == (Topology(1, 1, 4, 1), RankCoords(0, 0, 3, 0))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ()),
        ("mlx5_0, mlx5_1", ("mlx5_0", "mlx5_1")),
        ("mlx5_0,mlx5_0", ("mlx5_0",)),
        ('{"0": "mlx5_0", "1": "mlx5_2,mlx5_3"}', ("mlx5_2", "mlx5_3")),
        ("devices.json", ("mlx5_2", "mlx5_3")),
    ],
)
def test_devices_given_to_sglang_are_those_of_the_engine(monkeypatch, tmp_path, given, expected):
    """In each form that --disaggregation-ib-device takes, as SGLang checks it when the server
    starts and hands it to the manager, for the rank of GPU 1."""
    from sglang.srt.arg_groups import validation_hook

    from sglang_mooncake.sglang import seam

    (tmp_path / "devices.json").write_text('{"0": "mlx5_0", "1": "mlx5_2, mlx5_3"}')
    monkeypatch.chdir(tmp_path)
    names = [f"mlx5_{i}" for i in range(4)]
    found = SimpleNamespace(
        listdir=lambda _: names, path=SimpleNamespace(isdir=lambda _: True), environ={}
    )
    monkeypatch.setattr(validation_hook, "os", found)
    checked = validation_hook.validate_ib_devices(given)
    assert seam.rdma_devices(SimpleNamespace(ib_device=checked, gpu_id=1)) == expected


def test_a_gpu_that_is_given_no_device_stops_the_server():
    from sglang_mooncake.sglang import seam

    with pytest.raises(ValueError, match="No IB devices configured for GPU 1"):
        seam.rdma_devices(SimpleNamespace(ib_device='{"0": "mlx5_0"}', gpu_id=1))


def test_the_variables_of_sglang_that_begin_like_ours_are_known(srt):
    """Each one that a recipe may set, wherever SGLang reads it."""
    from sglang_mooncake.sglang.config import SGLANGS_OWN

    found = {
        name
        for path in srt.rglob("*.py")
        for name in re.findall("SGLANG_MOONCAKE_[A-Z0-9_]+", path.read_text())
    }
    assert found == SGLANGS_OWN


@pytest.mark.parametrize(
    ("said", "heartbeat_s", "failures"),
    [
        ({}, 0.5, 8),  # ours: SGLang's are made for HTTP requests
        ({"INTERVAL": "3"}, 3.0, 2),
        ({"MAX_FAILURE": "7"}, 5.0, 7),
        ({"INTERVAL": "0", "MAX_FAILURE": "0"}, 0.1, 1),
    ],
)
def test_heartbeats_are_the_operators_where_he_says_anything_of_them(
    monkeypatch, said, heartbeat_s, failures
):
    from sglang_mooncake.sglang import seam

    for name in ("INTERVAL", "MAX_FAILURE"):
        monkeypatch.delenv(f"SGLANG_DISAGGREGATION_HEARTBEAT_{name}", raising=False)
    for name, value in said.items():
        monkeypatch.setenv(f"SGLANG_DISAGGREGATION_HEARTBEAT_{name}", value)
    deadlines = seam._deadlines()
    assert (deadlines.heartbeat_s, deadlines.heartbeat_failures_max) == (heartbeat_s, failures)


@pytest.mark.parametrize(("said", "bootstrap_s", "waiting_s"), [("", 300, 300), ("78", 7, 8)])
def test_the_deadlines_of_a_room_are_those_of_sglang(monkeypatch, said, bootstrap_s, waiting_s):
    from sglang_mooncake.sglang import seam

    for name, value in zip(("BOOTSTRAP", "WAITING"), said or (None, None), strict=True):
        variable = f"SGLANG_DISAGGREGATION_{name}_TIMEOUT"
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    deadlines = seam._deadlines()
    assert (deadlines.bootstrap_s, deadlines.waiting_s) == (bootstrap_s, waiting_s)
