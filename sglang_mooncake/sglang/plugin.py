# SPDX-License-Identifier: Apache-2.0
"""SGLang's door (entry-point group `sglang.srt.plugins`): takes over the backend name `mooncake`.

SGLang only logs what a plugin raises, and would then quietly run its own engine. So when taking
over fails, `register` ends the process with one sentence; a server that comes up with
`--disaggregation-transfer-backend mooncake` and this package installed is served by it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_mooncake.sglang.releases import OLDEST, too_old, untested
from sglang_mooncake.sglang.store.asking_again import hook_tokenizer

__all__ = [
    "UnsupportedRelease",
    "check_release",
    "hook_decode_queue",
    "hook_prefill_queue",
    "register",
    "serving_classes",
]

logger = logging.getLogger(__name__)

_GET_KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
_SHARED_ENGINE = (
    "sglang.srt.distributed.device_communicators.mooncake_transfer_engine."
    "maybe_init_shared_mooncake_transfer_engine"
)
_ENSURE, _CREATE = "_ensure_prefill_info", "create_sender"
#: When SGLang last asked `try_ensure_parallel_info`, by registry address.
_LAST_ATTEMPTS = "_ensure_last_attempt_time"
_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


class UnsupportedRelease(RuntimeError):
    """The installed SGLang is too old for this package."""


def register() -> None:
    """Called by SGLang in every process that it starts, before it parses its arguments."""
    try:
        check_release()
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_GET_KV_CLASS, _get_kv_class, HookType.AROUND)
        HookRegistry.register(_SHARED_ENGINE, _init_shared_engine, HookType.AROUND)
        _check_targets()
        hook_tokenizer()
        _drop_in()
    except Exception as error:  # noqa: BLE001 - whatever it is, SGLang must not go on without us
        _stop(error)


def check_release() -> None:
    """Warns in the log of a release of SGLang that no test has run with.

    Raises:
        UnsupportedRelease: one that is too old.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "without metadata"
    reason = too_old(version)
    if reason is not None:
        raise UnsupportedRelease(reason)
    warning = untested(version)
    if warning is not None:
        logger.warning("%s", warning)


def serving_classes() -> dict[str, type]:
    """The classes that SGLang gets for the backend name `mooncake`."""
    from sglang_mooncake.sglang.manager import KVManager
    from sglang_mooncake.sglang.receiver import KVReceiver
    from sglang_mooncake.sglang.registry import ServersRegistry
    from sglang_mooncake.sglang.sender import KVSender

    return {
        "manager": KVManager,
        "sender": KVSender,
        "receiver": KVReceiver,
        "bootstrap_server": ServersRegistry,
    }


def _get_kv_class(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `get_kv_class(transfer_backend, class_type)`."""
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

    call = dict(zip(("transfer_backend", "class_type"), args, strict=False)) | kwargs
    if (
        call["transfer_backend"] != TransferBackend.MOONCAKE
        or call["class_type"] == KVClassType.KVARGS
    ):
        return original(*args, **kwargs)
    return serving_classes()[call["class_type"].value]


def _init_shared_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang makes one engine of the mooncake package per process, for PD and for others: HiCache,
    the encoder, elastic EP, expert backup. PD has our manager's own engine; whether one of the
    others wants Mooncake's is SGLang's to decide, as for a server without PD."""
    from sglang_mooncake.sglang.differences import call_without_pd

    return call_without_pd(original, *args, **kwargs)


def _drop_in() -> None:
    """If the operator says so."""
    from sglang_mooncake.sglang.config import Config

    config = Config.from_environment()
    if config.drop_in:
        from sglang_mooncake.sglang.drop_in import install

        install(config)


def hook_decode_queue() -> None:
    """For the manager of a decode rank: an instance that was looked up is taken at once.

    SGLang asks `try_ensure_parallel_info`, and after a "not yet" not again for a second; our
    look-up goes on beside it and takes milliseconds. SGLang's hook registry applies hooks before
    the roles of processes are known, and only to modules that this makes it import.

    Raises:
        LookupError: this SGLang has another decode queue.
    """
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    from sglang_mooncake.sglang.manager import KVManager

    original = getattr(DecodePreallocQueue, _ENSURE, None)
    if getattr(original, "of_sglang_mooncake", False):
        return
    code = getattr(inspect.unwrap(original), "__code__", None) if callable(original) else None
    if original is None or code is None or _LAST_ATTEMPTS not in code.co_names:
        raise LookupError(_missing(f"DecodePreallocQueue.{_ENSURE} that uses {_LAST_ATTEMPTS}"))

    @functools.wraps(original)
    def ensure_prefill_info(queue: Any, addr_to_reqs: dict[str, Any]) -> Any:
        if isinstance(queue.kv_manager, KVManager):
            for address in queue.kv_manager.prefill_info_table.keys() & addr_to_reqs.keys():
                getattr(queue, _LAST_ATTEMPTS).pop(address, None)
        return original(queue, addr_to_reqs)

    ensure_prefill_info.of_sglang_mooncake = True  # type: ignore[attr-defined]
    setattr(DecodePreallocQueue, _ENSURE, ensure_prefill_info)


def hook_prefill_queue() -> None:
    """For the manager of a prefill rank: it is told which bootstrap port a request names. SGLang
    hands its senders the server's own port, so that a request whose router was given another one
    would wait for decode servers that look for it elsewhere.

    Raises:
        LookupError: this SGLang has another prefill queue.
    """
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    from sglang_mooncake.sglang.manager import KVManager

    original = getattr(PrefillBootstrapQueue, _CREATE, None)
    if getattr(original, "of_sglang_mooncake_ports", False):
        return
    if not callable(original) or list(inspect.signature(original).parameters)[:2] != [
        "self",
        "req",
    ]:
        raise LookupError(_missing(f"PrefillBootstrapQueue.{_CREATE}(req)"))

    @functools.wraps(original)
    def create_sender(queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        manager = queue.kv_manager
        if not isinstance(manager, KVManager):
            return original(queue, req, *args, **kwargs)
        manager.named_port = req.bootstrap_port
        try:
            return original(queue, req, *args, **kwargs)
        finally:
            manager.named_port = None

    create_sender.of_sglang_mooncake_ports = True  # type: ignore[attr-defined]
    setattr(PrefillBootstrapQueue, _CREATE, create_sender)


def _check_targets() -> None:
    """A hook on a name that no longer exists would be dropped with a log line: look first."""
    from sglang_mooncake.sglang.differences import asks_for_pd

    for target in (_GET_KV_CLASS, _SHARED_ENGINE):
        module, _, name = target.rpartition(".")
        found = getattr(importlib.import_module(module), name, None)
        if not callable(found):
            raise LookupError(_missing(target))
        if target == _SHARED_ENGINE and not asks_for_pd(found):
            raise LookupError(_missing(f"{target} that asks get_disagg()"))
    serving_classes()  # all our modules import, so that a broken installation shows here


def _missing(target: str) -> str:
    return (
        f"this version of SGLang has no {target}: sglang-mooncake needs SGLang "
        f"{'.'.join(map(str, OLDEST))} or newer, and a release of its own for each newer series"
    )


def _stop(error: Exception) -> NoReturn:
    """What was foreseen has a sentence that says all; of the rest we need to know where it was."""
    # Those of a ConfigError, which this module must do without: it may be what cannot be imported.
    sentences = getattr(error, "sentences", ())
    if sentences:
        said = "".join(f"sglang-mooncake: {one}\n" for one in sentences)
        said += "The server stops here. `sglang-mooncake config` shows all settings.\n"
    else:
        if not isinstance(error, UnsupportedRelease | LookupError):
            traceback.print_exc()
        said = (
            f"sglang-mooncake cannot take over the transfer backend 'mooncake': {error}\n"
            "The server stops here: it would otherwise run SGLang's own engine under that name. "
            "To run that, leave this plugin out of SGLANG_PLUGINS.\n"
        )
    sys.stderr.write(said)
    sys.stderr.flush()
    # SGLang catches exceptions and SystemExit of a plugin would leave its child processes behind.
    os._exit(_EXIT_CODE)
