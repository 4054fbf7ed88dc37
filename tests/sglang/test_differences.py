# SPDX-License-Identifier: Apache-2.0
"""What stands for what a release of SGLang does not have, and where its ranks are kept in step."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def differences():
    from sglang_mooncake.sglang import differences

    return differences


@pytest.fixture
def before_23(monkeypatch, differences):
    """SGLang as it was before ranks agreed, and before lists left out the prefix."""
    importlib.import_module("sglang.srt.disaggregation.decode")  # which takes these names itself
    for name in ("all_reduce_flags", "filter_kv_indices_for_shard_rank"):
        monkeypatch.delattr(differences.utils, name, raising=False)


def test_a_setting_is_what_sglang_says_or_what_it_was_before_it_was_one(differences):
    name = "disaggregation_decode_allocation_policy"
    assert differences.setting(SimpleNamespace(**{name: "prefill_complete"}), name) == (
        "prefill_complete"
    )
    assert differences.setting(SimpleNamespace(), name) == "early"
    with pytest.raises(AttributeError):
        differences.setting(SimpleNamespace(), "enable_hisparse")


@pytest.mark.parametrize(
    ("facts", "servers", "ranks"),
    [
        ({"num_dp_ranks": 8, "dp_size": 2, "enable_dp_attention": True}, 2, 8),
        ({"dp_size": 4, "enable_dp_attention": True}, 1, 4),
        ({"dp_size": 4, "enable_dp_attention": False}, 4, 4),
    ],
)
def test_over_how_many_servers_and_ranks_requests_are_dealt_out(differences, facts, servers, ranks):
    parallel = SimpleNamespace(**facts)
    assert differences.servers_alike(parallel) == servers
    assert differences.dp_ranks(parallel) == ranks


def test_mooncakes_engine_is_decided_on_without_pd_by_server_args_too(differences):
    """As until 0.5.18."""

    def init(*, server_args, gpu_id):
        return server_args.disaggregation_mode, server_args.hicache_storage_backend, gpu_id

    given = SimpleNamespace(disaggregation_mode="decode", hicache_storage_backend="file")
    assert differences.asks_for_pd(init)
    assert differences.call_without_pd(init, server_args=given, gpu_id=3) == ("null", "file", 3)
    assert not differences.asks_for_pd(lambda gpu_id: None)


def test_fields_that_a_release_does_not_know_are_filled_in(monkeypatch, differences):
    monkeypatch.setattr(differences.KVArgs, "__annotations__", {"page_size": int})
    monkeypatch.delattr(differences.utils, "get_dsv41_spec_layout", raising=False)
    kv_args = SimpleNamespace(is_hybrid_mla_backend=False)
    assert differences.completed(kv_args, is_mla=False) is kv_args
    assert (kv_args.kv_layout, kv_args.num_draft_entries) == (None, 0)
    assert kv_args.mla_compression_ratios is None
    assert kv_args.swa_kv_cache_layout == "nhd"
    assert differences.completed(kv_args, is_mla=True).swa_kv_cache_layout is None


def test_fields_that_a_release_knows_are_left_alone(monkeypatch, differences):
    known = ("kv_layout", "num_draft_entries", "swa_kv_cache_layout")
    monkeypatch.setattr(differences.KVArgs, "__annotations__", dict.fromkeys(known, str))
    monkeypatch.setattr(differences.utils, "get_dsv41_spec_layout", lambda _: None, raising=False)
    kv_args = SimpleNamespace(is_hybrid_mla_backend=False, kv_layout="packed")
    differences.completed(kv_args, is_mla=False)
    assert vars(kv_args) == {"is_hybrid_mla_backend": False, "kv_layout": "packed"}


def test_lists_that_leave_out_the_prefix_are_told_from_those_that_do_not(
    request, monkeypatch, differences
):
    monkeypatch.setattr(differences.utils, "filter_kv_indices_for_shard_rank", None, raising=False)
    assert differences.conventions(("mamba", "swa")) == ()
    assert differences.conventions(("dsa",)) == ("dsa from the prefix on",)
    request.getfixturevalue("before_23")
    assert differences.conventions(("dsa",)) == ()
    (unknown,) = differences.conventions(("swa", "swa_ring", "swa_ring"))
    assert unknown == f"swa_ring as in {differences.release()}"


class Group:
    """Stands for SGLang's process group of two ranks, of which the other one says `other`."""

    def __init__(self, other: bool) -> None:
        self.cpu_group, self.other = self, other


@pytest.fixture
def in_a_group(monkeypatch, differences):
    def of(group):
        parallel = SimpleNamespace(attn_tp_group=group)
        monkeypatch.setattr(differences, "get_parallel", lambda: parallel)
        monkeypatch.setattr(differences.dist, "get_world_size", lambda asked: 2)

    def all_reduce(flags, op, group):
        assert op == differences.dist.ReduceOp.MIN
        flags.fill_(min(int(flags.item()), int(group.other)))

    monkeypatch.setattr(differences.dist, "all_reduce", all_reduce)
    return of


@pytest.mark.parametrize(
    ("own", "other", "all_of_them"),
    [(True, False, False), (False, True, False), (True, True, True)],
)
@pytest.mark.usefixtures("before_23")
def test_ranks_that_must_agree_say_what_all_of_them_say(
    differences, in_a_group, own, other, all_of_them
):
    in_a_group(Group(other))
    assert differences.ranks_must_agree()
    assert differences.agreed(own) is all_of_them


def test_ranks_of_a_release_that_agree_by_themselves_need_not(monkeypatch, differences, in_a_group):
    monkeypatch.setattr(differences.utils, "all_reduce_flags", None, raising=False)
    in_a_group(Group(True))
    assert not differences.ranks_must_agree()


@pytest.fixture
def queue_class(monkeypatch):
    from sglang.srt.disaggregation import decode

    class Queue:
        deferred_kv_release_timeout = 30.0

        def __init__(self):
            self.deadlines = []

        def _defer_release(self, decode_req):
            self.deadlines.append(self.deferred_kv_release_timeout)

    monkeypatch.setattr(decode, "DecodeTransferQueue", Queue)
    return Queue


@pytest.mark.parametrize(("must_agree", "deadline_s"), [(True, math.inf), (False, 30.0)])
@pytest.mark.usefixtures("before_23")
def test_what_is_held_has_been_given_up(differences, queue_class, must_agree, deadline_s):
    told = []
    receiver = SimpleNamespace(ensure_abort_notified=lambda: told.append("given up"))
    for _ in range(2):
        differences.hook_deferred_releases(must_agree)
    queue = queue_class()
    queue._defer_release(SimpleNamespace(kv_receiver=receiver))
    assert (told, queue.deadlines) == (["given up"], [deadline_s])


def test_a_release_whose_ranks_agree_is_left_alone(monkeypatch, differences, queue_class):
    monkeypatch.setattr(differences.utils, "all_reduce_flags", None, raising=False)
    original = queue_class._defer_release
    differences.hook_deferred_releases(must_agree=True)
    assert queue_class._defer_release is original


@pytest.mark.usefixtures("before_23")
def test_a_queue_that_holds_pages_otherwise_is_refused(monkeypatch, differences, queue_class):
    monkeypatch.setattr(queue_class, "_defer_release", lambda self, decode_req: None)
    with pytest.raises(LookupError, match="_defer_release"):
        differences.hook_deferred_releases(must_agree=True)
