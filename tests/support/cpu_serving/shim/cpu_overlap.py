# SPDX-License-Identifier: Apache-2.0
"""Overlap scheduling on a CPU: what a forward writes is there later, as on a GPU.

SGLang computes a forward on the spot. With this stand-in, nobody outside may see that:

- `torch.cuda` and `torch.cpu` have the streams and events of `cpu_streams`.
- On a prefill server the KV pool gives out the addresses of copies (`cpu_published`), in which the
  slots of a forward are garbage until its stream gets there, layer by layer: the next layer comes a
  seeded time later, and what is recorded between two layers has happened between them.
- Pinned memory is ordinary memory into which a non-blocking copy writes when its stream gets there.

So who reads a page, or a pinned array, before its event has happened gets garbage. Set up by the
JSON of `CPU_SERVING_STREAMS`, see `Settings`; what was seen is counted in a file (`Counts`).
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import cpu_published
import cpu_streams
import torch

__all__ = ["COUNTED", "Counts", "PinnedTensor", "Settings", "install"]

VARIABLE = "CPU_SERVING_STREAMS"
#: What `Counts` counts, in this order.
COUNTED = ("events", "waits", "early_prefixes", "pinned_copies", "garbled_slots")
#: While the folder of the counts holds a file of this name, nobody but SGLang's scheduler waits for
#: events, and pinned memory is filled at once, so that KV alone may be read too early.
CONTROL = "ignore-events"


class Settings(NamedTuple):
    """delay_ms: time of a long piece of work on a stream.
    layer_ms: time that the KV of one layer takes, at most.
    published: whether the KV pool's addresses are those of published copies (prefill servers).
    folder: of the file of counts, and of the file that begins a negative control (`CONTROL`).
    """

    delay_ms: float
    layer_ms: float
    seed: int
    published: bool
    folder: str

    @classmethod
    def from_environment(cls) -> Settings | None:
        text = os.environ.get(VARIABLE)
        return cls(**json.loads(text)) if text else None


class Counts:
    """Little-endian u64 per name of `COUNTED`, in a file that is mapped: it may be read at any
    time. The file is made with the first count."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.counts"
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            if self._map is None:
                size = 8 * len(COUNTED)
                self._path.write_bytes(bytes(size))
                with self._path.open("r+b") as file:
                    self._map = mmap.mmap(file.fileno(), size)
            at = 8 * COUNTED.index(name)
            (before,) = struct.unpack_from("<Q", self._map, at)
            struct.pack_into("<Q", self._map, at, before + number)


class PinnedTensor(torch.Tensor):
    """Host memory that a device copies into: see the module."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    #: Told of each non-blocking copy; says whether it happens without delay.
    copies_at_once: Callable[[], bool] = staticmethod(lambda: False)

    def is_pinned(self, *_args: Any) -> bool:
        return True

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> PinnedTensor:
        plain = self.as_subclass(torch.Tensor)
        if not non_blocking or type(self).copies_at_once():
            plain.copy_(source)
            return self
        value = source.clone()
        plain.zero_()  # a valid index, and a wrong one

        def arrive() -> None:
            plain.copy_(value)

        cpu_streams.current_stream().launch(arrive)
        return self


def install(torch_module: ModuleType) -> cpu_published.Patches:
    """To be called once torch is imported; returns what to do with which of SGLang's modules then.

    Nothing happens unless `CPU_SERVING_STREAMS` is set.
    """
    settings = Settings.from_environment()
    if settings is None:
        return {}
    counts = Counts(Path(settings.folder))
    _give_streams(torch_module, settings, counts)
    patches: cpu_published.Patches = {
        "sglang.srt.disaggregation.prefill": lambda module: _count_early_sends(module, counts)
    }
    if settings.published:
        patches |= cpu_published.patches(
            _arrive_in_stream, lambda slots: counts.add("garbled_slots", slots)
        )
    return patches


def _arrive_in_stream(action: Callable[[], None]) -> None:
    cpu_streams.current_stream().launch(action, is_layer=True)


def _give_streams(torch_module: ModuleType, settings: Settings, counts: Counts) -> None:
    times_s = (settings.delay_ms / 1000, settings.layer_ms / 1000)
    cpu_streams.reset(cpu_streams.Device(*times_s, settings.seed))
    control = Path(settings.folder) / CONTROL

    class CountedEvent(cpu_streams.Event):
        """Counts the waits of others than SGLang, and has none of them in a negative control."""

        _was_counted = False

        def record(self, stream: cpu_streams.Stream | None = None) -> None:
            counts.add("events")
            super().record(stream)

        def query(self) -> bool:
            return super().query() or self._is_ignored()

        def synchronize(self) -> None:
            if not self.query():
                super().synchronize()

        def _is_ignored(self) -> bool:
            if threading.current_thread() is threading.main_thread():
                return False  # SGLang's scheduler
            if not self._was_counted:
                self._was_counted = True
                counts.add("waits")
            return control.exists()

    def copies_at_once() -> bool:
        counts.add("pinned_copies")
        return control.exists()

    PinnedTensor.copies_at_once = staticmethod(copies_at_once)
    for module in (torch_module.cuda, torch_module.cpu):
        module.Event, module.Stream = CountedEvent, cpu_streams.Stream
        module.StreamContext = module.stream = cpu_streams.StreamContext
        module.current_stream = cpu_streams.current_stream
        module.synchronize = lambda _device=None: cpu_streams.device().wait_all()
    torch_module.cuda.is_current_stream_capturing = lambda: False
    torch_module.empty = _pinning(torch_module.empty)


def _pinning(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapped(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        plain = empty(*args, **kwargs)
        return plain.as_subclass(PinnedTensor) if pin_memory else plain

    return wrapped


def _count_early_sends(module: ModuleType, counts: Counts) -> None:
    mixin = module.SchedulerDisaggregationPrefillMixin
    original = mixin.maybe_send_cached_prefix_chunk

    @functools.wraps(original)  # others look at what it is
    def counting(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        before = req.start_send_idx
        original(scheduler, req, *args, **kwargs)
        if req.start_send_idx > before:
            counts.add("early_prefixes")

    mixin.maybe_send_cached_prefix_chunk = counting
