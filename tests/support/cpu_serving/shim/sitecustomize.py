# SPDX-License-Identifier: Apache-2.0
"""Test support: lets the unmodified SGLang run on a machine without a GPU.

This directory stands first on PYTHONPATH of every server process. Thirteen gaps are closed, each
when the module it concerns is imported and not otherwise:

- PyPI's torchvision is built for CUDA; beside a CPU torch its C extension does not load and the
  import fails for want of two op schemas, which are declared here.
- With DP attention an idle rank asks its attention backend for a fill value that only the AMX
  backend knows; the torch-native one gets the same answer.
- The torch-native backend writes the KV of sliding-window layers into their own pool, and reads it
  at the indices of the other pool. It is given those of the right one.
- DeepSeek's MLA has an absorbed form (one latent per token, as the KV pool stores it) that the
  backends for CPUs compute correctly. SGLang's dispatch has no rule for them and would pick the
  form with a key per head, which does not fit the pool. The rule is added.
- SGLang's torch code for experts knows no EP, see `cpu_experts.py`.
- EPLB, before it moves experts, has the device give back memory; torch's module for CPUs has none
  to give back.
- A draft model (MTP) shares DeepSeek's embedding and head, and SGLang waits for the GPU that has
  copied them. There is none to wait for.
- Where the last token of a draft's prefix lies SGLang asks Triton, except for `torch_native`, and
  MTP runs on `intel_amx` (`servers.py` says why). It has the same in torch, which is taken.
- HiCache's host pools want a GPU, see `cpu_hicache.py`, and LoRA adapters pinned memory, see
  `cpu_lora.py`.
- What an encoder has computed lands in memory of a GPU. It gets host memory.
- Weights for another server are found in a snapshot of CUDA's memory. SGLang has the same for each
  weight by itself, which is taken.
- Overlap scheduling of a prefill server needs the streams and events of a GPU. A server that is to
  run it gets a stand-in, see `cpu_overlap.py`. What servers get that hand KV over layer by layer
  is in `cpu_layers.py`.

vLLM's processes for a CPU are new interpreters, which import everything again for 10 CPU-seconds
each. They are forked instead, as vLLM forks them where there is a GPU; the cores that it then gives
to each of them come too late, and they share those of the server.

vLLM's connector of NIXL pins workers on a CPU to the last core of the host, all to the same. They
keep those that they have. Its connectors of Mooncake ask which GPU a worker has, and for an event
on its stream: they hear of the first one, and that what was computed is there, as on a CPU it is.
The command `vllm` asks for the version of a package of that name; the build for CPUs has another.

With `CPU_SERVING_STOCK=1` SGLang's own backends run on a CPU. It registers every KV pool with NIXL
as memory of a GPU, which UCX refuses when it is not: NIXL's word for it then means host memory. And
it copies indices for Mooncake's sender by an event of a GPU: the sender then says that it takes
ready ones, as those of other backends do.

Servers of both may leave the processor to others while they wait, see `cpu_waits.py`.

A server may also pretend that its KV pool is memory of a GPU, see `cpu_cuda.py`.

With `CPU_SERVING_WITHOUT_KV=1` a prefill server hands over everything but KV and state: that is the
negative control of all comparisons of tokens.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias


def _declare_torchvision_ops() -> None:
    import torch

    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        registered("torchvision::nms", "Meta")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _keep_alive.append(library)


def _mend_torch_native(module: ModuleType) -> None:
    backend = module.TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda _self: 1
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, _reading_windows(getattr(backend, name)))


def _reading_windows(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        pool, tokens = backend.token_to_kv_pool, backend.req_to_token_pool
        if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
            return forward(backend, q, k, v, layer, *args, **kwargs)
        indices = pool.translate_loc_from_full_to_swa(tokens.req_to_token)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=indices)
        try:
            return forward(backend, q, k, v, layer, *args, **kwargs)
        finally:
            backend.req_to_token_pool = tokens

    return wrapped


def _dispatch_to_absorbed_mla(module: ModuleType) -> None:
    method = module.AttnForwardMethod.MLA
    for name in ("torch_native", "intel_amx"):
        module.AttentionBackendRegistry.register(name, lambda _attn, _batch: method)


def _skip_experts_of_others(module: ModuleType) -> None:
    import cpu_experts

    cpu_experts.patch(module)


def _keep_no_memory(module: ModuleType) -> None:
    module.torch.cpu.empty_cache = lambda: None


def _share_without_waiting(module: ModuleType) -> None:
    model = module.DeepseekV2ForCausalLM
    share = model.set_embed_and_head

    def wrapped(self: Any, embed: Any, head: Any) -> None:
        cuda = module.torch.cuda
        wait, cuda.synchronize = cuda.synchronize, lambda: None
        try:
            share(self, embed, head)
        finally:
            cuda.synchronize = wait

    model.set_embed_and_head = wrapped


def _locate_without_triton(module: ModuleType) -> None:
    module.get_last_loc_triton = module.get_last_loc_torch


class _TorchOfTheHost:
    """torch, with new tensors of a GPU in host memory."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *size: Any, device: str = "cpu", **kwargs: Any) -> Any:
        return self._torch.empty(*size, device=device.replace("cuda", "cpu"), **kwargs)


def _receive_in_host_memory(module: ModuleType) -> None:
    module.torch = _TorchOfTheHost(module.torch)


def _offer_each_weight(module: ModuleType) -> None:
    module.register_memory_region_v2 = module.register_memory_region_v1


def stand_in_for_a_gpu(torch_module: ModuleType | None = None) -> None:
    """As the environment says. Called once torch is imported, and again by a process that has been
    forked since and has an environment of its own."""
    import cpu_layers
    import cpu_overlap

    streams = cpu_overlap.install(torch_module or sys.modules["torch"])
    kv = {"sglang_mooncake.layout.plan": _leave_kv_out}
    for patches in (streams, kv, cpu_layers.install()):
        _patch_all(patches)


def _patch_all(patches: Mapping[str, Patch]) -> None:
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            _AFTER[name] = _both(_AFTER.get(name), patch)


def _both(first: Patch | None, second: Patch) -> Patch:
    def wrapped(module: ModuleType) -> None:
        if first is not None:
            first(module)
        second(module)

    return wrapped


def _pretend_cuda(module: ModuleType) -> None:
    import cpu_cuda

    cpu_cuda.claim_pools(module)


def _of_hicache(name: str) -> Patch:
    def patch(module: ModuleType) -> None:
        import cpu_hicache

        getattr(cpu_hicache, name)(module)

    return patch


def _of_lora(name: str) -> Patch:
    def patch(module: ModuleType) -> None:
        import cpu_lora

        getattr(cpu_lora, name)(module)

    return patch


def _of_waits(name: str) -> Patch:
    def patch(module: ModuleType) -> None:
        import cpu_waits

        getattr(cpu_waits, name)(module)

    return patch


def _fork_vllm(module: ModuleType) -> None:
    module.get_mp_context = lambda: multiprocessing.get_context("fork")


def _leave_kv_out(module: ModuleType) -> None:
    if os.environ.get("CPU_SERVING_WITHOUT_KV") != "1":
        return
    import te

    nothing = te.Blocks.concat([])
    module.Plan.part = module.Plan.state = lambda *_indices: nothing


def _leave_cores_alone(module: ModuleType) -> None:
    names = vars(module.os) | {"sched_setaffinity": lambda _pid, _mask: None}
    module.os = SimpleNamespace(**names)  # type: ignore[attr-defined]


def _name_a_device(module: ModuleType) -> None:
    module.torch.accelerator.current_device_index = lambda: 0


def _know_the_version(module: ModuleType) -> None:
    known = SimpleNamespace(version=lambda _name: sys.modules["vllm"].__version__)
    module.importlib = SimpleNamespace(metadata=known)  # type: ignore[attr-defined]


class _Past:
    """An event that has happened."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def _compute_at_once(module: ModuleType) -> None:
    module.torch.cuda.Event = _Past


def _is_stock() -> bool:
    return os.environ.get("CPU_SERVING_STOCK") == "1"


def _take_host_memory(module: ModuleType) -> None:
    if not _is_stock():
        return
    agent = module.nixl_agent
    make = agent.__init__

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.nixl_mems |= dict.fromkeys(("VRAM", "cuda"), self.nixl_mems["DRAM"])

    agent.__init__ = wrapped


def _take_ready_indices(module: ModuleType) -> None:
    if _is_stock():
        module.MooncakeKVSender.supports_host_tensor_indices = False


Patch: TypeAlias = Callable[[ModuleType], None]
_keep_alive: list[Any] = []
_BEFORE_SUBMODULES_OF = {"torchvision": _declare_torchvision_ops}
_VLLMS_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
_AFTER: dict[str, Patch] = {
    "torch": stand_in_for_a_gpu,
    "torch.distributed.distributed_c10d": _of_waits("share_a_loop"),
    "nixl_cu12._api": _take_host_memory,
    "sglang.srt.disaggregation.mooncake.conn": _take_ready_indices,
    "sglang.srt.disaggregation.encoder.receiver": _receive_in_host_memory,
    "sglang.srt.eplb.expert_distribution": _keep_no_memory,
    "sglang.srt.layers.attention.torch_native_backend": _mend_torch_native,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _dispatch_to_absorbed_mla,
    "sglang.srt.layers.moe.fused_moe_native": _skip_experts_of_others,
    "sglang.srt.lora.backend.torch_backend": _of_lora("compute_unpinned"),
    "sglang.srt.lora.layers": _of_lora("make_unpinned"),
    "sglang.srt.lora.lora": _of_lora("keep_unpinned"),
    "sglang.srt.managers.scheduler": _of_waits("rest_when_idle"),
    "sglang.srt.mem_cache.allocation": _locate_without_triton,
    "sglang.srt.mem_cache.pool_host.base": _of_hicache("use_all_memory"),
    "sglang.srt.mem_cache.pool_host.common": _of_hicache("allocate_plainly"),
    "sglang.srt.mem_cache.pool_host.mha": _of_hicache("copy_by_torch"),
    "sglang.srt.mem_cache.pool_host.mla": _of_hicache("copy_by_torch"),
    "sglang.srt.model_loader.remote_instance_weight_loader_utils": _offer_each_weight,
    "sglang.srt.models.deepseek_v2": _share_without_waiting,
    "sglang_mooncake.sglang.manager": _pretend_cuda,
    "vllm.distributed.device_communicators.shm_broadcast": _of_waits("pause_between_looks"),
    f"{_VLLMS_CONNECTORS}.mooncake.mooncake_connector": _name_a_device,
    f"{_VLLMS_CONNECTORS}.mooncake.store.worker": _compute_at_once,
    f"{_VLLMS_CONNECTORS}.nixl.base_worker": _leave_cores_alone,
    "vllm.entrypoints.cli.main": _know_the_version,
    "vllm.utils.system_utils": _fork_vllm,
}


class _PatchingLoader(Loader):
    """Loads a module as its own loader would, then patches it."""

    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> ModuleSpec | None:
        parent = fullname.partition(".")[0]
        if parent != fullname and parent in _BEFORE_SUBMODULES_OF:
            _BEFORE_SUBMODULES_OF.pop(parent)()
        patch = _AFTER.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)  # this finder has forgotten the name by now
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


sys.meta_path.insert(0, _Finder())
