# SPDX-License-Identifier: Apache-2.0
"""``sglang-mooncake router`` as a process: listens, serves until it is told to end, and lets what
is under way come to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import sys
from random import SystemRandom
from typing import TYPE_CHECKING, Final

import uvloop
from aiohttp import web

from bootstrap_server.admission.refusals import http_logger
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_keys
from sglang_mooncake.router.app import make_app, servers_of
from sglang_mooncake.router.looking import Tokens
from sglang_mooncake.router.options import CACHE_AWARE, Options

if TYPE_CHECKING:
    from sglang_mooncake.router.store_source import StoreSource

__all__ = ["allow_open_files", "serve"]

logger = logging.getLogger(__name__)

#: A thousand clients may ask at the same moment.
BACKLOG: Final = 1024
#: Answers that are under way when the router is told to end have so long to come to their end.
SHUTDOWN_S: Final = 30.0
#: Clients keep a connection open between requests; most of their libraries give it up before.
KEEPALIVE_S: Final = 75.0
EXIT_CANNOT_LISTEN: Final = 1
EXIT_REFUSED: Final = 2
#: Objects more than there were before that make Python look for cycles of garbage. Its own 700 are
#: made by three requests, and to look again each time cost 8 % of the processor.
GARBAGE_OBJECTS: Final = 20_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(options: Options) -> int:
    """Serves until SIGINT or SIGTERM; the exit status."""
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    allow_open_files()
    for name in options.without_effect:
        logger.warning("%s changes nothing in this router", name)
    with contextlib.ExitStack() as undo:
        option = "--secret-file"
        try:
            keys = read_keys(options.secret_file)
            option = "--store"
            pool = None if options.store is None else _pool(options.store, keys, undo)
            option = "--tokenizer-path"
            tokens = _tokens(options)
        except (ValueError, OSError) as error:
            sys.stderr.write(f"sglang-mooncake router: {option}: {error}\n")
            return EXIT_REFUSED
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(options, keys, pool, tokens))


def allow_open_files() -> None:
    """As many as the host lets this process have: a request takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _pool(settings: str, keys: Keys, undo: contextlib.ExitStack) -> StoreSource:
    # Here, since the store takes time to import.
    from sglang_mooncake.router.store_source import StoreSource, open_store

    return undo.enter_context(contextlib.closing(StoreSource(open_store(settings, keys))))


def _tokens(options: Options) -> Tokens | None:
    if options.tokenizer is None:
        if options.prefill_policy == CACHE_AWARE:
            logger.info(
                "prompts that come as text are compared as text, which is a guess: --tokenizer-path"
                " names the directory of the model, whose tokenizer tells their tokens"
            )
        return None
    try:
        from sglang_mooncake.router.tokenizing import load
    except ImportError as error:
        raise ValueError(
            f"{error.name} is missing: install sglang-mooncake[router], or SGLang"
        ) from error
    return load(options.tokenizer)


async def _serve(
    options: Options, keys: Keys, pool: StoreSource | None, tokens: Tokens | None
) -> int:
    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = await make_app(
        options, servers_of(options), SystemRandom(), keys=keys, pool=pool, tokens=tokens
    )
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=http_logger("sglang_mooncake.router.http"),
        handler_cancellation=True,  # A client that leaves ends its request on both servers.
        shutdown_timeout=SHUTDOWN_S,
        keepalive_timeout=KEEPALIVE_S,
        auto_decompress=False,
    )
    await runner.setup()
    gc.freeze()  # What is there now stays.
    gc.set_threshold(GARBAGE_OBJECTS)
    try:
        site = web.TCPSite(runner, options.host, options.port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            sys.stderr.write(
                f"sglang-mooncake router: cannot listen on {options.host} port {options.port}"
                f" (--host, --port): {error.strerror or error}\n"
            )
            return EXIT_CANNOT_LISTEN
        (host, port, *_) = runner.addresses[0]
        logger.info("the router listens on %s port %d", host, port)
        await stop.wait()
        logger.info("the router ends; requests under way have %g s", SHUTDOWN_S)
    finally:
        await runner.cleanup()
    return 0
