# SPDX-License-Identifier: Apache-2.0
"""`python -m bootstrap_server`: a bootstrap server in a process of its own."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from bootstrap_server.access import StatusPage
from bootstrap_server.errors import BootstrapError
from bootstrap_server.exposure import exposure
from bootstrap_server.registry import LEASE_S
from bootstrap_server.secret import Keys
from bootstrap_server.secret_file import read_secret_file
from bootstrap_server.server import BootstrapServer

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap_server", description="Registry of prefill ranks for SGLang."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8998, help="port, 0 for any (%(default)s)")
    parser.add_argument(
        "--lease-s",
        type=float,
        default=LEASE_S,
        help="seconds that a rank lives after its last renewal (%(default)g)",
    )
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error")
    )
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="file with the deployment's secrets, one per line: only servers that have one of them "
        "are served (docs/security.md; default: everybody is)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen on a public address without a secret"
    )
    parser.add_argument(
        "--status-page",
        choices=[page.value for page in StatusPage],
        help="who may open the status page, http://HOST:PORT/, without proving the secret: `open` "
        "everybody, `local` programs on this host, `off` nobody (default: local with a secret, "
        "open without one)",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Blocked before the server's thread starts, which inherits it: the signals then wait for
    # sigwait below, wherever they arrive.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        secrets = read_secret_file(options.secret_file) if options.secret_file else []
        keys = Keys.from_secrets(secrets).registry
        said = exposure(options.host, bool(keys), options.insecure, "--insecure")
        if said is not None and said.refused:
            raise ValueError(said.sentence)
        if said is not None:
            logger.warning("%s", said.sentence)
        page = StatusPage(options.status_page) if options.status_page else None
        server = BootstrapServer(options.host, options.port, options.lease_s, keys=keys, page=page)
    except (BootstrapError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    with server:
        sys.stdout.write(f"bootstrap server listens on {server.host} port {server.port}\n")
        sys.stdout.flush()
        signal.sigwait(_SIGNALS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
