# SPDX-License-Identifier: Apache-2.0
"""A decode server's first request to a prefill instance, new or restarted, waits for no interval of
SGLang's: here that interval never ends, so a request that waited for it would never be answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference, Serving
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import SHIM, Fleet, Pair, ServerOptions
from cpu_serving.traffic import make_requests
from patient import patient

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

#: A plugin of SGLang, as our own is, in the decode server alone.
PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def register():
    HookRegistry.register(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue.__init__", endless, HookType.AFTER
    )

def endless(result, queue, *args, **kwargs):
    queue._ensure_retry_interval = float("inf")
    print("SGLang's retry interval never ends", flush=True)
"""


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("first"), nursery) as fleet:
        yield fleet


def plugin_in(directory: Path) -> Path:
    """A folder for PYTHONPATH that holds the plugin as an installed package."""
    metadata = directory / "endless_retries-1.dist-info"
    metadata.mkdir(parents=True)
    (directory / "endless_retries.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: endless-retries\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nendless = endless_retries:register\n"
    )
    return directory


@pytest.fixture(scope="module")
def pair(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    options = patient(ServerOptions(make_model("llama")))
    path = f"{SHIM}:{plugin_in(tmp_path_factory.mktemp('plugin'))}"
    pair = fleet.pair(
        options, replace(options, extra_env={**options.extra_env, "PYTHONPATH": path})
    )
    pair.wait_ready()
    return pair


def test_first_requests_to_a_new_and_to_a_restarted_instance(
    fleet: Fleet, pair: Pair, reference: Reference
) -> None:
    assert "SGLang's retry interval never ends" in pair.decode.process.log_text()
    Serving(pair, "llama", reference).assert_equal(make_requests(4, 300, seed=71))
    pair.prefill.stop()
    again = Serving(replace(pair, prefill=fleet.again(pair.prefill)), "llama", reference)
    again.pair.wait_ready()
    again.assert_equal(make_requests(4, 300, seed=72))
    again.assert_whole()
