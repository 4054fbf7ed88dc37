# SPDX-License-Identifier: Apache-2.0
"""vLLM's servers on the CPU: command lines, environment, requests. They run in .venv-vllm
(``scripts/setup vllm``), beside the environment of everything else here."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cpu_serving.nursery import Nursery
from cpu_serving.ports import HOST
from cpu_serving.processes import ServingError
from cpu_serving.servers import SHIM, Fleet, answers_at
from cpu_serving.traffic import Answer, Request
from cpu_serving.vllm_proxy import Proxy

__all__ = [
    "BLOCK",
    "VllmServer",
    "ask",
    "ask_mooncake_pair",
    "body_of",
    "counters",
    "handed_over",
    "imported_tokens",
    "mooncake_flags",
    "mooncake_store_flags",
    "nixl_flags",
    "nursery_of_vllm",
    "pair_flags",
    "reset",
    "side_channel",
    "start_vllm",
    "store_flags",
]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm/bin/python"
#: Tokens of a block. vLLM's kernels for CPUs are fastest with 32.
BLOCK = 32
#: What a server imports, and its processes for the engine and the TP ranks.
PRELOAD = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "sglang_mooncake.vllm.pd_connector",
    "sglang_mooncake.vllm.store_connector",
)
#: Names, or their beginnings, of variables that nothing reads before a server runs.
READ_LATER = (
    "CPU_SERVING_",
    "PYTEST_",
    "SGLANG_MOONCAKE_",
    "VLLM_CPU_OMP_THREADS_BIND",
    "XDG_RUNTIME_DIR",
)
REQUEST_TIMEOUT_S = 120.0
#: They are written each second.
COUNTERS_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class VllmServer:
    """One vLLM server: its process, and where it listens."""

    process: Any
    url: str

    def ready(self) -> bool:
        """Whether the server answers; raises ServingError when it has ended."""
        self.process.check_alive()
        return answers_at(f"{self.url}/health")

    def stop(self) -> None:
        self.process.stop()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or over those with one such as `source="x"`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=REQUEST_TIMEOUT_S) as response:
            text = response.read().decode()
        found = re.findall(rf"^{re.escape(name)}({{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)


def store_flags(memory: str, place: Path, **more: Any) -> list[str]:
    """Of a server whose prefix cache is on the store.

    place: where the store's processes meet, in a directory of its own: not with those of the user.
    more: further settings.
    """
    config = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "sglang_mooncake.vllm.store_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "memory": memory,
            "directory": str(place / "kvstore"),
            **more,
        },
    }
    return ["--kv-transfer-config", json.dumps(config)]


def pair_flags(role: str, policy: str = "recompute", **more: Any) -> list[str]:
    """Of a prefill or decode server.

    role: "kv_producer" or "kv_consumer".
    policy: what becomes of a request whose prompt does not come: "recompute" or "fail".
    more: further settings.
    """
    config = {
        "kv_connector": "PDConnector",
        "kv_connector_module_path": "sglang_mooncake.vllm.pd_connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": more,
    }
    return ["--kv-transfer-config", json.dumps(config)]


def nixl_flags(role: str, policy: str = "recompute", connector: str = "NixlConnector") -> list[str]:
    """Of a prefill or decode server with one of vLLM's own connectors of NIXL: that one has the
    decode server read, NixlPushConnector the prefill server write."""
    config = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
    }
    return ["--kv-transfer-config", json.dumps(config)]


def side_channel(port: int) -> dict[str, str]:
    """Variables of a server with a connector of NIXL: where it gives out its metadata."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


def mooncake_flags(role: str, policy: str = "recompute") -> list[str]:
    """Of a prefill or decode server with vLLM's own connector of Mooncake."""
    config = {
        "kv_connector": "MooncakeConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    return ["--kv-transfer-config", json.dumps(config)]


def mooncake_store_flags() -> list[str]:
    """Of a server with vLLM's own connector of Mooncake's store."""
    config = {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return ["--kv-transfer-config", json.dumps(config)]


def imported_tokens(server: VllmServer) -> float:
    """Prompt tokens whose KV cache came from elsewhere, by a connector."""
    return server.metric("vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"')


def counters(stats_dir: Path, role: str) -> Mapping[str, int]:
    """Of the ranks of the one prefill or decode server that keep their counters there, added up:
    rooms by how they ended, and bytes sent."""
    found: Counter[str] = Counter()
    for file in stats_dir.glob(f"{role}-*.json"):
        said = json.loads(file.read_text())
        found.update({**said["rooms"], "bytes": said["bytes"]})
    return found


def handed_over(stats_dir: Path, rooms: int) -> int:
    """Bytes that a prefill server has sent, once so many rooms are done, each counted on every
    rank. Raises ServingError."""
    deadline_s = time.monotonic() + COUNTERS_TIMEOUT_S
    while (said := counters(stats_dir, "prefill"))["done"] < rooms:
        if time.monotonic() > deadline_s:
            raise ServingError(f"the prefill server has not handed {rooms} prompts over: {said}")
        time.sleep(0.05)
    return said["bytes"]


def nursery_of_vllm(log: Path) -> Nursery:
    """Where servers of the installed release are forked, on whatever cores. Raises ServingError."""
    _require()
    env = _environment(log.parent, [0], None)
    return Nursery(env, log, python=PYTHON, preload=PRELOAD, read_later=READ_LATER)


def _require() -> None:
    if not PYTHON.exists():
        raise ServingError(f"there is no {PYTHON}: run scripts/setup vllm")


def start_vllm(
    fleet: Fleet,
    name: str,
    model: Path,
    runtime_dir: Path,
    flags: Sequence[str] = (),
    core: int = 0,
    tp: int = 1,
    release: Path | None = None,
    more_env: Mapping[str, str] = MappingProxyType({}),
    port: int | None = None,
    by_run: bool = False,
) -> VllmServer:
    """Starts one, forked from the fleet's nursery if it fits there.

    runtime_dir: where its store finds others', with a short name, and mode 0700.
    core: the first of this process's that it has; each TP rank has one.
    release: the folder of another release of vLLM.
    more_env: variables besides; what they say of PYTHONPATH comes first there.
    port: without one a free one.
    by_run: by users' own command, `sglang-mooncake run -- vllm serve`, and never forked.

    Raises:
        ServingError: vLLM's environment is not there.
    """
    _require()
    port = port or fleet.port()
    argv = ["vllm.entrypoints.openai.api_server", "--model", str(model)]
    if by_run:
        argv = ["sglang_mooncake.sglang.cli", "run", "--", "vllm", "serve", str(model)]
        more_env = {"PATH": os.pathsep.join((str(PYTHON.parent), os.environ["PATH"])), **more_env}
    argv += ["--host", HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    argv += ["--max-model-len", "2048", "--max-num-seqs", "8", "--block-size", str(BLOCK)]
    argv += ["--enable-prompt-tokens-details", "--tensor-parallel-size", str(tp), *flags]
    ours = sorted(os.sched_getaffinity(0))
    cores = [ours[(core + rank) % len(ours)] for rank in range(tp)]
    env = dict(_environment(runtime_dir, cores, release))
    path = (more_env.get("PYTHONPATH"), env["PYTHONPATH"])
    env |= {**more_env, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    log = fleet.run_dir / f"{name}.log"
    process = fleet.process(f"{name} server", argv, env, log, PYTHON, is_server=not by_run)
    return VllmServer(process, f"http://{HOST}:{port}")


def _environment(
    runtime_dir: Path, cores: Sequence[int], release: Path | None
) -> Mapping[str, str]:
    paths = [SHIM, ROOT] if release is None else [SHIM, release.absolute(), ROOT]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "XDG_RUNTIME_DIR": str(runtime_dir),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_TARGET_DEVICE": "cpu",  # else it is told by the package's name
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request compiles
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",  # as vLLM has it on one core; a nursery must have no threads
    }


def ask(server: VllmServer | Proxy, requests: Sequence[Request]) -> list[Answer]:
    """All at once; the answers in the order of the requests."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda one: _ask(server, one), requests))


def body_of(request: Request) -> dict[str, Any]:
    """Of the request's completion, with the tokens in the answer. A prefill and a decode server
    that get the same one find together by its number, where the prefill server writes."""
    return {
        "request_id": uuid.uuid4().hex,
        "prompt": list(request.input_ids),
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **request.fields,
    }


def _ask(server: VllmServer | Proxy, request: Request) -> Answer:
    try:
        answer = _post(f"{server.url}/v1/completions", body_of(request))
    except (OSError, ValueError) as error:
        said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
        return Answer((), f"{error!r} {said}", 0.0)
    choice, usage = answer["choices"][0], answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    error = None if choice["finish_reason"] == "length" else f"ended by {choice['finish_reason']}"
    return Answer(
        tuple(choice["token_ids"]), error, 0.0, cached_tokens=details.get("cached_tokens") or 0
    )


def ask_mooncake_pair(
    prefill: VllmServer, bootstrap_url: str, decode: VllmServer, request: Request
) -> Answer:
    """As proxies do for vLLM's connector of Mooncake: both servers are told the number of a
    transfer, and the decode server which engine of the prefill server's registry has it.

    bootstrap_url: of that registry.
    """
    with urllib.request.urlopen(f"{bootstrap_url}/query", timeout=REQUEST_TIMEOUT_S) as response:
        (rank,) = json.loads(response.read()).values()
    transfer = {"transfer_id": uuid.uuid4().hex}
    fields = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, **transfer}}
    _post(f"{prefill.url}/v1/completions", body_of(request) | fields)
    params = {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap_url,
        "remote_engine_id": rank["engine_id"],
        **transfer,
    }
    return _ask(decode, replace(request, fields={**request.fields, "kv_transfer_params": params}))


def reset(server: VllmServer) -> None:
    """Empties the server's own prefix cache."""
    _post(f"{server.url}/reset_prefix_cache", {})


def _post(url: str, body: Mapping[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        text = response.read()
    return json.loads(text) if text else None
