# SPDX-License-Identifier: Apache-2.0
"""The manager that SGLang makes once per scheduler process: it owns the transfer engine, registers
the rank's memory and its place, and is what senders and receivers share.

The members are those that SGLang 0.5.23's schedulers read (sglang/srt/disaggregation/base/conn.py,
prefill.py, decode.py); the work is done by `PrefillSide` and `DecodeSide`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

import te
from bootstrap_server import (
    BootstrapClient,
    Rank,
    RankLease,
    RankRecord,
    close_leases,
    instance_name_of,
)
from bootstrap_server.admission.exposure import exposure
from bootstrap_server.admission.signatures import signed
from sglang_mooncake.decode_side import CompletionBuffer, DecodeSide
from sglang_mooncake.explain.questions import answers
from sglang_mooncake.given_up import GivenUpWatch
from sglang_mooncake.instances import PrefillInfo
from sglang_mooncake.layout import Buffers, Layout, Verify, early_layers
from sglang_mooncake.links.sockets import numeric_address
from sglang_mooncake.metrics import METRICS
from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.rank_report import DecodePeer, RankReport
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.sglang.config import INSECURE, Config
from sglang_mooncake.sglang.differences import (
    agreed,
    completed,
    conventions,
    deferred_release_enabled,
    hook_deferred_releases,
    ranks_must_agree,
    release,
)
from sglang_mooncake.sglang.layerwise import Layerwise
from sglang_mooncake.sglang.listing import in_one_line
from sglang_mooncake.sglang.plugin import hook_decode_queue, hook_prefill_queue, serving_classes
from sglang_mooncake.sglang.pools.kv_args import KVArgsLike, layout_from_kv_args, memory_ranges
from sglang_mooncake.sglang.presence import presence_leases
from sglang_mooncake.sglang.prometheus import Exporter, HandoverFigures
from sglang_mooncake.sglang.recompute import Recompute
from sglang_mooncake.sglang.registry import prove_dp_rank_queries
from sglang_mooncake.sglang.seam import (
    BaseKVManager,
    DisaggregationMode,
    StageBoard,
    UnsupportedServer,
    kv_heads,
    metric_labels,
    pins_host_memory,
    rank_context,
    rank_label,
    rdma_devices,
    recompute_address,
    server_address,
    stage_board,
)
from sglang_mooncake.sglang.tracing import open_tracing
from sglang_mooncake.sglang.transports import open_engine, register
from sglang_mooncake.stats import Recorder
from te.memory import Remote

__all__ = ["KVManager"]

logger = logging.getLogger(__name__)

_NO_COMPLETIONS = Buffers((), (), ())
#: Threads in which SGLang's decode scheduler asks registries for DP ranks.
_QUERY_WORKERS = 8


class KVManager(BaseKVManager):  # type: ignore[misc]
    """One per scheduler process. `prefill_side` or `decode_side` is set, after SGLang's mode.

    Raises:
        transports.HandoverUnavailable: memory that no transport can move.
        BootstrapError: the registry was not reached in time, or refused this rank.
        seam.UnsupportedServer, kv_args.UnsupportedPool, config.ConfigError: what they say.
    """

    #: --enable-pd-role-switch: `teardown` comes before a manager of the other role is made.
    supports_role_switch = True
    #: Decode, for the receivers, too: about when pages are held, and when they are released.
    ranks_must_agree = False

    def __init__(
        self,
        args: KVArgsLike,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        self.kv_args = args = completed(args, bool(is_mla_backend))
        self.server_args = server_args
        self.disaggregation_mode = disaggregation_mode
        self.is_mla_backend = bool(is_mla_backend)
        self.config = Config.from_environment()
        logger.info("settings: %s", in_one_line(self.config.given))
        context = rank_context(args, disaggregation_mode, server_args, self.config.host)
        try:
            host = numeric_address(context.host)
        except ValueError as error:
            raise UnsupportedServer(str(error)) from error
        self.context = dataclasses.replace(
            context,
            host=host,
            keys=self.config.keys,
            verify=Verify[self.config.verify.upper()],
            verify_dir=self.config.verify_dir,
        )
        self._check_exposure()
        # Read by SGLang's schedulers as they stand.
        self.attn_cp_rank = self.context.coords.cp
        self.attn_cp_size = self.context.config.topology.cp_size
        # Every CP rank is asked for every room, and told what to send: none is a dummy.
        self.is_dummy_cp_rank = False
        # SGLang takes it for the reason to filter pages in send(), which the prefill side does.
        self.enable_all_cp_ranks_for_transfer = False
        self.enable_staging = False
        self.enable_deferred_decode_kv_release = deferred_release_enabled()
        #: For the senders.
        self.pins_host_memory = self.context.role == "prefill" and pins_host_memory()

        self.engine = open_engine(
            self.config,
            self.context.host,
            rdma_devices(args),
            is_first=args.gpu_id == server_args.base_gpu_id,
            label=rank_label(self.context),
        )
        self.recorder = Recorder(
            self.context,
            _serving_classes(),
            self.engine.stats,
            self.config.stats_dir,
            self.config.story_rooms,
        )
        self.engine.add_answers(answers(self.recorder, self.context))
        labels = metric_labels(self.context)
        self._exporter = (
            None
            if labels is None
            else Exporter(METRICS, HandoverFigures(self.recorder, self.engine.stats), labels)
        )
        #: Read by the hook on SGLang's queue (`tracing.hook_queue`).
        self.tracing = open_tracing(self.context.role, self.recorder)
        self._regions: list[te.Region] = []
        self.register_buffer_to_engine()
        self.prefill_side: PrefillSide | None = None
        self.decode_side: DecodeSide | None = None
        #: Prefill: at the server's own registry. Both: at those that run by themselves.
        self._leases: list[RankLease] = []
        self._given_up: GivenUpWatch | None = None
        #: Prefill, written by the hook on SGLang's queue (`plugin.hook_prefill_queue`): which port
        #: the request names of which SGLang makes a sender now; None if it names none.
        self.named_port: int | None = None
        self.stages: StageBoard | None = None
        self._layerwise: Layerwise | None = None
        #: Decode: rooms whose pages SGLang may ask about, by number. A number may be in use again
        #: while the pages of its former use are still held.
        self._rooms: dict[int, list[Room]] = {}
        self._queries: concurrent.futures.ThreadPoolExecutor | None = None
        self._recompute: Recompute | None = None
        if self.context.role == "prefill":
            self._start_prefill(self._layout(_NO_COMPLETIONS))
        else:
            self._start_decode()
        atexit.register(self.close)
        logger.info(
            "sglang-mooncake serves %s with %s: %d %s buffers, page size %d, %s, over %s",
            self.context.name,
            release(),
            len(args.kv_data_ptrs),
            "MLA" if self.is_mla_backend else "K and V",
            args.page_size,
            self.context.config.format.kv_cache_dtype,
            ",".join(self.engine.stats().transports),
        )

    def _check_exposure(self) -> None:
        """Of a server's ranks, the first one says what all of them are."""
        host, config = self.context.host, self.config
        said = exposure(host, bool(config.keys), config.insecure, f"{INSECURE}=1")
        if said is not None and said.refused:
            raise UnsupportedServer(said.sentence)
        coords = self.context.coords
        if said is not None and not any((coords.dp, coords.cp, coords.tp, coords.pp)):
            logger.warning("%s", said.sentence)

    def _layout(self, completions: Buffers) -> Layout:
        layout = layout_from_kv_args(
            self.kv_args,
            self.context.config.format.kv_cache_dtype,
            self.is_mla_backend,
            completions,
            kv_heads(self.kv_args, self.server_args),
            self.context.place,
            self.context.split,
        )
        return msgspec.structs.replace(
            layout, release=release(), conventions=conventions(layout.states)
        )

    def _start_decode(self) -> None:
        hook_decode_queue()
        if self.enable_deferred_decode_kv_release:
            self.ranks_must_agree = ranks_must_agree()
            hook_deferred_releases(self.ranks_must_agree)
        if self.config.keys:
            prove_dp_rank_queries(self.config.keys.registry)
        completions = CompletionBuffer(self.engine)
        self.decode_side = DecodeSide(
            self.context,
            self.engine,
            self._layout(completions.buffers),
            completions,
            self.recorder,
            self.config.registries,
            self.config.link_timeout_s,
            self.config.registry,
        )
        self.decode_side.start()
        self._leases = presence_leases(
            self.context,
            self.config,
            *server_address(self.server_args, self.context.host),
            self.engine.epoch,
            lambda: self._rank_report(tuple),
        )

    def _start_prefill(self, layout: Layout) -> None:
        self.stages = stage_board()
        self.prefill_side = PrefillSide(
            self.context, self.engine, layout, self.recorder, self.stages
        )
        self._control_port = self.prefill_side.start(self.config.ports)
        self._control_key = self.prefill_side.control_key
        if self.config.layerwise:
            self._layerwise = self._hook_forwards(self.prefill_side, layout)
        hook_prefill_queue()
        self.register_to_bootstrap()
        self._watch_given_up(self.prefill_side)

    def _watch_given_up(self, side: PrefillSide) -> None:
        """SGLang ends a request on all ranks of a DP rank when one of them has ended it."""
        if not self.context.coords.is_first_of_dp:
            return
        address, keys = self.context.bootstrap_address, self.config.keys.registry
        self._given_up = GivenUpWatch(lambda: BootstrapClient(address, keys=keys), side.given_up)
        self._given_up.start()

    def _hook_forwards(self, side: PrefillSide, layout: Layout) -> Layerwise:
        drafts = int(self.kv_args.num_draft_entries)
        layerwise = Layerwise(
            side,
            self.recorder,
            sum(self.kv_args.kv_item_lens[: len(self.kv_args.kv_item_lens) - drafts]),
            early_layers(layout),
            by_position=not self.kv_args.kv_layer_ids,
            has_streams=self.pins_host_memory,
        )
        layerwise.install()
        return layerwise

    def register_to_bootstrap(self) -> None:
        """Puts this prefill rank into its instance's registry, and keeps it there until `close()`;
        raises BootstrapError when that cannot be begun."""
        assert self.prefill_side is not None
        record = RankRecord(
            config=self.context.config,
            rank=Rank(
                coords=self.context.coords,
                host=self.context.host,
                port=self._control_port,
                epoch=self.engine.epoch,
                prefill_http_port=self.context.prefill_http_port,
                control_key=self._control_key,
            ),
        )
        own = self.context.bootstrap_address
        self._leases.append(
            RankLease(
                own,
                signed(record, self.config.keys.record),
                deadline_s=self.config.register_timeout_s,
                keys=self.config.keys.registry,
                status=self._rank_report(self.prefill_side.decode_peers),
            )
        )
        # This server serves without them: they may come up later.
        name = instance_name_of(own)
        self._leases += [
            RankLease(
                address,
                signed(record, self.config.keys.record, name),
                instance=name,
                deadline_s=None,
                keys=self.config.keys.registry,
                status=self._rank_report(self.prefill_side.decode_peers),
            )
            for address in self.config.registry
        ]

    def _rank_report(self, peers: Callable[[], Iterable[DecodePeer]]) -> RankReport:
        """One for each lease: it tells rates since its last call."""
        return RankReport(
            self.engine.stats,
            self.engine.links,
            peers,
            self.recorder.rooms,
            self.recorder.failures.last,
        )

    # --- memory ---

    def register_buffer_to_engine(self) -> None:
        """Registers caches and metadata buffers (again, after SGLang has taken memory back). Peers
        write those of decode ranks, under the tags of rooms; nobody reads any."""
        remote: Remote = "none" if self.context.role == "prefill" else "tagged"
        self._regions += register(self.engine, memory_ranges(self.kv_args), remote)

    def deregister_buffer_to_engine(self) -> None:
        """SGLang is about to unmap the buffers; nothing lands in them after this returns."""
        while self._regions:
            # A transfer that was aborted reads until its destination has answered, or stalls.
            self.engine.deregister(self._regions[-1], 2 * self.config.stall_timeout_s)
            self._regions.pop()

    # --- decode: prefill instances ---

    @property
    def prefill_info_table(self) -> dict[str, PrefillInfo]:
        """Known prefill instances by registry address; read by SGLang's decode scheduler."""
        return self.decode_side.instances.infos if self.decode_side is not None else {}

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the instance is known. Never waits: asking goes on in a worker."""
        assert self.decode_side is not None
        return self.decode_side.instances.ensure(bootstrap_addr)

    # --- decode: pages of failed requests ---

    def track(self, room: Room) -> None:
        self._rooms.setdefault(room.number, []).append(room)

    def untrack(self, room: Room) -> None:
        rooms = self._rooms.get(room.number, [])
        if room in rooms:
            rooms.remove(room)
        if not rooms:
            self._rooms.pop(room.number, None)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no write can reach the pages of a failed room any more. Needs no peer's word
        (`required_acks`): our own engine has closed the room's tags."""
        del required_acks
        is_safe = all(room.releasable for room in self._rooms.get(bootstrap_room, ()))
        return agreed(is_safe) if self.ranks_must_agree else is_safe

    def register_deferred_abort_room(self, bootstrap_room: int) -> None:
        """SGLang 0.5.19 and 0.5.20: acknowledgements count from now on. We need none."""

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """SGLang has released the pages of a failed room; its `clear()` of the receiver follows,
        and that is where we forget the room."""

    # --- decode: recomputing a retracted request ---

    def _ensure_prefill_recompute_executor(self) -> concurrent.futures.ThreadPoolExecutor:
        """SGLang's name for the pool in which its decode scheduler queries registries for the DP
        ranks of rooms. Recomputing has threads of its own: it takes minutes."""
        if self._queries is None:
            self._queries = concurrent.futures.ThreadPoolExecutor(
                _QUERY_WORKERS, thread_name_prefix="kv-query"
            )
        return self._queries

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """Has the prefill server compute a retracted request's KV again (SGLang's
        CommonKVManager.submit_prefill_recompute). All ranks are called, one of them asks."""
        if not self.context.coords.is_first_of_dp:
            return
        address = kv_receiver.bootstrap_addr
        info = self.prefill_info_table.get(address)
        if info is None or info.prefill_http_port is None:
            kv_receiver.fail(
                f"cannot recompute: the HTTP port of prefill server {address} is not known"
            )
            return
        if self._recompute is None:
            context = self.context
            self._recompute = Recompute(context.deadlines.waiting_s, context.names.waiting)
        self._recompute.ask(
            recompute_address(address, info.prefill_http_port),
            payload,
            lambda: not kv_receiver.ended,
            kv_receiver.fail,
        )

    def teardown(self) -> None:
        """The server changes its role: it is idle, and a manager of the other role follows, with
        the same memory. Nothing lands in it after this returns."""
        self.close()
        self.recorder.close()
        atexit.unregister(self.close)
        logger.info("%s has ended: the server changes its role", self.context.name)

    def close(self) -> None:
        """Ends all threads and connections. Idempotent."""
        if self._layerwise is not None:
            self._layerwise.close()
        if self._given_up is not None:
            self._given_up.close()
        close_leases(self._leases)
        for side in (self.prefill_side, self.decode_side):
            if side is not None:
                side.close()
        if self.stages is not None:
            self.stages.close()
        if self._queries is not None:
            self._queries.shutdown(wait=False, cancel_futures=True)
        if self._recompute is not None:
            self._recompute.close()
        if self._exporter is not None:
            self._exporter.close()
        if self.tracing is not None:
            self.tracing.close()
        self.engine.close()


def _serving_classes() -> dict[str, str]:
    """Which classes SGLang constructs for the backend name `mooncake` in this process."""
    return {role: f"{cls.__module__}.{cls.__qualname__}" for role, cls in serving_classes().items()}
