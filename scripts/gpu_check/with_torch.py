# SPDX-License-Identifier: Apache-2.0
"""PyTorch beside te: memory of its allocators, and CUDA graphs that it captures while te copies."""

from __future__ import annotations

import importlib
from typing import Any, Final

from gpu_check.child import Failed, Skipped, Task
from gpu_check.pairs import ARRIVAL_BYTES, MEMORY_BYTES, TAG, pieces_arrive
from gpu_check.processes import connected, sides

__all__ = ["allocations", "capture", "graph", "problem"]

#: What an allocator is called here → the settings that choose it; releases differ in the name of
#: the variable.
ALLOCATORS: Final = {
    "caching": "",
    "expandable segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}
VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GRAPHS: Final = 50


def problem() -> str:
    """Why there is no PyTorch for GPUs here; empty if there is."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "PyTorch is not installed"
    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU"


def allocations(task: Task, transport: str) -> dict[str, Any]:
    """GPU to GPU, from and to parts of tensors at odd addresses."""
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    for number, (name, setting) in enumerate(ALLOCATORS.items()):
        task.doing(f"{name}: starting")
        environment = dict.fromkeys(VARIABLES, setting) if setting else {}
        with sides(task, "source", "target", **environment) as (source, target):
            if why := source.ask("has_torch"):
                raise Skipped(why)
            connected(source, target, transport, ("torch", "torch"), nbytes)
            seeds = range(700 + 10 * number, 702 + 10 * number)
            pieces_arrive(task, source, target, name, seeds)
    return {"found": dict.fromkeys(ALLOCATORS, "every byte right")}


def graph(task: Task, transport: str) -> dict[str, Any]:
    """Graphs are captured in one process while te's threads copy in it, to and from the GPU."""
    with sides(task, "source", "target") as (source, target):
        if why := target.ask("has_torch"):
            raise Skipped(why)
        connected(source, target, transport, ("torch", "torch"), ARRIVAL_BYTES * 64)
        target.ask("expect", tag=TAG)
        graphs = task.scaled(GRAPHS, 2)
        task.doing("capturing in both processes")
        source.post("flood_and_capture", graphs=graphs, tag=TAG)
        captured = target.ask("capture", graphs=graphs)
        outcomes = source.answer()
        if outcomes != {"done": sum(outcomes.values())}:
            raise Failed(f"transfers beside the captures ended as {outcomes}")
    return {"found": {"graphs_in_each_process": captured, "transfers": outcomes}}


def capture(graphs: int) -> int:
    """Captures so many, in PyTorch's default mode, runs them, and looks at what they made."""
    torch = importlib.import_module("torch")
    given = torch.arange(4096, device="cuda", dtype=torch.float32)
    for number in range(graphs):
        one = torch.cuda.CUDAGraph()
        with torch.cuda.graph(one):
            made = given * 2 + number
        one.replay()
        torch.cuda.synchronize()
        if not bool((made == given * 2 + number).all()):
            raise Failed(f"graph {number} made something else")
    return graphs
