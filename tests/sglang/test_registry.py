# SPDX-License-Identifier: Apache-2.0
"""SGLang's own managers, senders and receivers against our bootstrap server, and SGLang's own rank
mapping beside ours.

What is real: SGLang's configuration and rank placement, its registration and query code, and the
zmq sockets behind the addresses that go through the registry. Left out is what moves bytes (the
constructors of the subclasses of CommonKVManager), which needs packages that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu_serving.model import make_model

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    CPTransfer,
    MismatchError,
    RankCoords,
    Topology,
    sending,
    sources,
)
from bootstrap_server.admission.secret import Keys

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

HOST = "127.0.0.1"
PAGE_SIZE = 16


def sglang_families() -> dict[str, tuple[type, type, type]]:
    """Manager, sender and receiver of the backends that inherit SGLang's registration."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.mooncake.conn import (
        MooncakeKVManager,
        MooncakeKVReceiver,
        MooncakeKVSender,
    )
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver, NixlKVSender

    def without_engine(manager: type) -> type:
        return type(
            manager.__name__,
            (manager,),
            {
                "__init__": CommonKVManager.__init__,
                "build_receiver_registration_message": lambda self: [
                    b"hello",
                    str(self.kv_args.engine_rank).encode(),
                ],
            },
        )

    return {
        "mooncake": (without_engine(MooncakeKVManager), MooncakeKVSender, MooncakeKVReceiver),
        "nixl": (without_engine(NixlKVManager), NixlKVSender, NixlKVReceiver),
    }


class PPGroup:
    """SGLang's pipeline group within one process: what stage 0 says, the others hear."""

    def __init__(self) -> None:
        self.said: Any = None

    def broadcast_object(self, value: Any, src: int) -> Any:
        self.said = self.said if value is None else value
        return self.said


@contextmanager
def sglang_rank(
    model: Path, mode: str, port: int, world_rank: int, pp_group: PPGroup, **flags: Any
) -> Iterator[tuple[Any, Any]]:
    """SGLang's configuration as the scheduler process `world_rank` has it, and its KVArgs."""
    from sglang.srt import runtime_context
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=str(model),
        device="cpu",
        host=HOST,
        port=31_000,
        page_size=PAGE_SIZE,
        disaggregation_mode=mode,
        disaggregation_bootstrap_port=port,
        **flags,
    )
    ranks = runtime_context.SpawnRanks(world_rank=world_rank, gpu_id=0, dp_rank=None)
    context = runtime_context.create_context(server_args, role="scheduler", ranks=ranks)
    with runtime_context.use_context(context):
        parallel = runtime_context.get_parallel()
        with parallel.override(pp_group=pp_group):
            args = KVArgs()
            args.kv_cache_dtype_str, args.page_size = "auto", PAGE_SIZE
            args.kv_item_lens, args.state_item_lens, args.state_types = [64], [], []
            args.system_dp_rank = None
            args.engine_rank, args.pp_rank = parallel.tp_rank, parallel.pp_rank
            yield server_args, args


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 to tp2": ({"tp_size": 2}, {"tp_size": 2}),
    "tp4 to tp2": ({"tp_size": 4}, {"tp_size": 2}),
    "tp2 to tp4": ({"tp_size": 2}, {"tp_size": 4}),
    "pp2 to pp1": ({"tp_size": 2, "pp_size": 2}, {"tp_size": 2}),
    "pp2 to pp2": ({"pp_size": 2}, {"pp_size": 2}),
    "dp2 to tp2": ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, {"tp_size": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("family", ["mooncake", "nixl"])
@pytest.mark.parametrize("pair", PAIRS)
def test_sglangs_own_ranks_register_and_find_each_other(
    model: Path, family: str, pair: str
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_parallel

    manager_class, sender_class, receiver_class = sglang_families()[family]
    prefill_flags, decode_flags = PAIRS[pair]
    with BootstrapServer(HOST, 0) as server, ExitStack() as undo:
        address, pp_group = f"{HOST}:{server.port}", PPGroup()
        managers: dict[RankCoords, Any] = {}
        ranks = prefill_flags.get("tp_size", 1) * prefill_flags.get("pp_size", 1)
        for world_rank in range(ranks):
            with sglang_rank(
                model, "prefill", server.port, world_rank, pp_group, **prefill_flags
            ) as (server_args, args):
                manager = manager_class(args, DisaggregationMode.PREFILL, server_args, False)
                undo.callback(manager.server_socket.close, 0)
                parallel = get_parallel()
                coords = RankCoords(
                    parallel.attn_dp_rank, 0, parallel.attn_tp_rank, parallel.pp_rank
                )
                managers[coords] = manager
                if parallel.num_dp_ranks > 1:
                    sender_class(manager, address, bootstrap_room=40 + parallel.attn_dp_rank)
        assert len(managers) == ranks

        prefill = Topology(*(1 + max(getattr(c, axis) for c in managers) for axis in AXES))
        dp_rank = prefill.dp_size - 1
        decode = Topology(1, 1, decode_flags.get("tp_size", 1), decode_flags.get("pp_size", 1))
        for world_rank, me in enumerate(sorted(decode.coords(), key=lambda c: (c.pp, c.tp))):
            with sglang_rank(
                model, "decode", server.port, world_rank, pp_group, **decode_flags
            ) as (server_args, args):
                manager = manager_class(args, DisaggregationMode.DECODE, server_args, False)
                undo.callback(manager.server_socket.close, 0)
                assert manager.try_ensure_parallel_info(address)
                info = manager.prefill_info_table[address]
                assert (info.page_size, info.kv_cache_dtype) == (PAGE_SIZE, "auto")
                assert info.prefill_http_port == 31_000
                assert info.dp_size == prefill.dp_size
                receiver = receiver_class(manager, address, bootstrap_room=7)
                receiver.init(dp_rank)
                assert receiver.conclude_state is None
                assert manager.check_status(7) == KVPoll.WaitingForInput
                # It has found the addresses of exactly the ranks that our matching names …
                expected = {source.coords for source in sources(prefill, decode, me, dp_rank)}
                assert {info["rank_port"] for info in receiver.bootstrap_infos} == {
                    managers[coords].rank_port for coords in expected
                }
                assert info.required_dst_info_num == max(
                    source.destinations for source in sources(prefill, decode, me, dp_rank)
                )
                # … and its registration reaches them.
                for coords in expected:
                    message = receive(managers[coords].server_socket)
                    assert message == [b"hello", str(args.engine_rank).encode()]
        if prefill.dp_size > 1:
            found = receiver_class.query_prefill_dp_ranks(address, [40, 41, 42])
            assert found == {}  # these flags follow the room, so nothing was registered
            sender_class._register_prefill_dp_rank(
                SimpleNamespace(
                    bootstrap_server_url=address,
                    bootstrap_room=40,
                    kv_mgr=managers[RankCoords(1, 0, 0, 0)],
                )
            )
            assert receiver_class.query_prefill_dp_ranks(address, [40, 41]) == {"40": 1}
        receiver_class.close_all_sockets()


AXES = RankCoords.__struct_fields__


def receive(socket: Any) -> list[bytes]:
    import zmq

    assert socket.poll(60_000, zmq.POLLIN)
    return list(socket.recv_multipart())


def sglang_mapping(
    prefill: Topology, decode: Topology, me: RankCoords, mla: bool, all_cp_ranks: bool
) -> Any:
    from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo

    info = PrefillServerInfo(
        attn_tp_size=prefill.tp_size,
        attn_cp_size=prefill.cp_size,
        dp_size=prefill.dp_size,
        pp_size=prefill.pp_size,
        page_size=PAGE_SIZE,
        kv_cache_dtype="auto",
        follow_bootstrap_room=True,
    )
    manager = SimpleNamespace(
        is_mla_backend=mla,
        is_hybrid_mla_backend=False,
        attn_tp_size=decode.tp_size,
        attn_cp_size=decode.cp_size,
        attn_cp_rank=me.cp,
        pp_size=decode.pp_size,
        pp_rank=me.pp,
        kv_args=SimpleNamespace(engine_rank=me.tp),
        enable_all_cp_ranks_for_transfer=all_cp_ranks,
    )
    CommonKVManager._resolve_rank_mapping(manager, info)
    return info


POWERS = (1, 2, 4, 8, 16)


@pytest.mark.parametrize("all_cp_ranks", [False, True])
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize(("cp", "pp", "decode_pp"), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (4, 2, 2)])
def test_matching_agrees_with_sglang_wherever_sglang_has_an_answer(
    cp: int, pp: int, decode_pp: int, mla: bool, all_cp_ranks: bool
) -> None:
    mode = CPTransfer.PAGES if all_cp_ranks else CPTransfer.FIRST
    for prefill_tp in POWERS:
        for decode_tp in POWERS:
            prefill = Topology(2, cp, prefill_tp, pp)
            decode = Topology(2, 1, decode_tp, decode_pp)
            for me in decode.coords():
                theirs = sglang_mapping(prefill, decode, me, mla, all_cp_ranks)
                found = sources(prefill, decode, me, 1, mode)
                # SGLang does not ask CP ranks that send nothing; they do not wait there.
                real = [source for source in found if source.pages.of > 0]
                assert {source.coords for source in real} == {
                    RankCoords(1, cp_rank, tp, stage)
                    for cp_rank in theirs.target_cp_ranks
                    for tp in theirs.target_tp_ranks
                    for stage in theirs.target_pp_ranks
                }
                assert {source.destinations for source in found} == {theirs.required_dst_info_num}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Topology(1, 1, 1, 2), Topology(1, 1, 1, 4)),
        (Topology(1, 1, 1, 1), Topology(1, 1, 1, 2)),
        (Topology(1, 2, 1, 1), Topology(1, 2, 1, 1)),
    ],
)
def test_what_sglang_refuses_we_refuse_with_a_sentence(prefill: Topology, decode: Topology) -> None:
    me = RankCoords(0, 0, 0, 0)
    with pytest.raises(AssertionError):
        sglang_mapping(prefill, decode, me, False, False)
    with pytest.raises(MismatchError):
        sources(prefill, decode, me, 0)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_head_slices_agree_with_sglangs(heads: int) -> None:
    from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params

    for prefill_tp in POWERS:
        for decode_tp in POWERS:
            if prefill_tp == decode_tp:
                continue
            for me in Topology(1, 1, decode_tp, 1).coords():
                asked = sources(Topology(1, 1, prefill_tp, 1), Topology(1, 1, decode_tp, 1), me, 0)
                for source in asked:
                    p = source.coords.tp
                    units = sending(heads, prefill_tp, p, decode_tp, me.tp)
                    if not units:
                        # Of replicas SGLang lets all write the same, we let one.
                        assert prefill_tp > heads
                        continue
                    theirs = compute_head_slice_params(prefill_tp, decode_tp, p, me.tp, heads)
                    first = p * heads // prefill_tp
                    first_there = me.tp * heads // decode_tp
                    assert theirs[:3] == (
                        units.start - first,
                        len(units),
                        units.start - first_there,
                    )


def test_page_shares_agree_with_sglangs() -> None:
    import numpy as np
    from sglang.srt.disaggregation.utils import filter_kv_indices_for_cp_rank

    for cp_size in (1, 2, 3, 8):
        for total in (0, 1, 7, 8, 100):
            for first in range(0, max(total, 1), 3):
                chunk = range(first, min(first + 3, total))
                for source in sources(
                    Topology(1, cp_size, 1, 1),
                    Topology(1, 1, 1, 1),
                    RankCoords(0, 0, 0, 0),
                    0,
                    CPTransfer.PAGES,
                ):
                    manager = SimpleNamespace(attn_cp_rank=source.coords.cp, attn_cp_size=cp_size)
                    indices, where = filter_kv_indices_for_cp_rank(
                        manager, np.array(chunk), slice(chunk.start, chunk.stop), total
                    )
                    ours = source.pages.within(chunk, total)
                    assert list(indices) == list(ours)
                    assert len(ours) == 0 or (where.start, where.stop) == (ours.start, ours.stop)


def test_a_decode_scheduler_with_a_secret_proves_its_queries(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.disaggregation import decode

    from sglang_mooncake.sglang.registry import prove_dp_rank_queries

    own = decode.CommonKVReceiver.query_prefill_dp_ranks
    monkeypatch.setattr(decode.CommonKVReceiver, "query_prefill_dp_ranks", staticmethod(own))
    key = b"k" * 32
    with BootstrapServer(HOST, 0, keys=[key]) as server:
        address = f"{HOST}:{server.port}"
        with BootstrapClient(address, 60.0, keys=[key]) as client:
            client.register_dp_rank(40, 1)
        assert decode.CommonKVReceiver.query_prefill_dp_ranks(address, [40, 41]) == {}
        prove_dp_rank_queries([key])
        assert decode.CommonKVReceiver.query_prefill_dp_ranks(address, [40, 41]) == {"40": 1}


def test_an_sglang_that_asks_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    from sglang_mooncake.sglang.registry import prove_dp_rank_queries

    monkeypatch.delattr(CommonKVReceiver, "query_prefill_dp_ranks")
    with pytest.raises(LookupError, match="query_prefill_dp_ranks"):
        prove_dp_rank_queries([b"k" * 32])


def ranks_say(host: str, tp: int = 0, **settings: object) -> None:
    """What a manager says of its address as it is made."""
    from sglang_mooncake.sglang.config import Config
    from sglang_mooncake.sglang.manager import KVManager

    manager = KVManager.__new__(KVManager)
    manager.config = Config(**settings)
    manager.context = SimpleNamespace(host=host, coords=SimpleNamespace(dp=0, cp=0, tp=tp, pp=0))
    manager._check_exposure()


def test_a_server_without_a_secret_says_so_once(caplog):
    ranks_say("10.0.0.7", tp=0)
    ranks_say("10.0.0.7", tp=1)
    (said,) = [one.getMessage() for one in caplog.records]
    assert "no secret is set: whoever can reach 10.0.0.7" in said


def test_a_server_without_a_secret_stays_off_public_addresses(caplog):
    from sglang_mooncake.sglang.seam import UnsupportedServer

    with pytest.raises(UnsupportedServer, match="start with SGLANG_MOONCAKE_INSECURE=1"):
        ranks_say("192.88.99.1", tp=1)
    ranks_say("192.88.99.1", insecure=True)
    assert "192.88.99.1 is a public address" in caplog.text
    ranks_say("192.88.99.1", keys=Keys.from_secrets([b"a secret of the deployment"]))
    assert len(caplog.records) == 1
