# SPDX-License-Identifier: Apache-2.0
"""te bench with memory of GPUs, on a driver without one: what is measured means nothing, but every
byte is looked at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cpu_serving.cuda import build_driver
from te_gpu_python import gpu_python

from te_bench import tables
from te_bench.bars import BARS, CUDA_BARS
from te_bench.report import as_json
from te_bench.runner import Case, run_case
from te_bench.shapes import Shape


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    return gpu_python(folder, build_driver(folder))


def case(python: Path, transport: str, memory: str, peers: tuple[str, ...]) -> Case:
    return Case(
        shape=Shape("kv", 40, 5001),
        transport=transport,
        memory=memory,
        busy=False,
        rounds=2,
        seed=1,
        peers=peers,
        floors="fit",
        python=str(python),
        peers_python=str(python),
        deadline_s=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "memory", "peers"),
    [
        ("samehost", "cuda", ("device-copy",)),
        ("tcp", "cuda", ("te-host",)),
        ("tcp", "cuda-host", ()),
        ("samehost", "host-cuda", ()),
    ],
)
def test_memory_of_gpus(python: Path, transport: str, memory: str, peers: tuple[str, ...]) -> None:
    result = run_case(case(python, transport, memory, peers), lambda part, what: None)
    found = as_json(result)
    assert {name: one["state"] for name, one in found["results"].items()} == dict.fromkeys(
        ("te", *peers), "ok"
    ), found
    assert all(one["verified"] for one in found["results"].values())
    assert f"memory {memory}" in tables.title(result)
    assert not [bar for bar in (*BARS, *CUDA_BARS) if bar.concerns(result)]  # a smaller shape


@pytest.mark.slow
def test_without_a_gpu_it_is_absent(tmp_path: Path) -> None:
    result = run_case(case(Path(sys.executable), "tcp", "cuda", ()), lambda part, what: None)
    te = as_json(result)["results"]["te"]
    assert te["state"] == "absent"
    assert "CUDA's driver cannot be loaded: libcuda.so.1" in te["reason"]
