# SPDX-License-Identifier: Apache-2.0
"""`python -m bootstrap_server`: a bootstrap server in a process of its own."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from bootstrap_server.admission.exposure import exposure
from bootstrap_server.admission.own_addresses import addresses_behind
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_secret_file
from bootstrap_server.ranks.errors import BootstrapError
from bootstrap_server.server import BootstrapServer
from bootstrap_server.settings.server import Config
from bootstrap_server.settings.values import ConfigError

#: Settings that cannot be used.
EXIT_REFUSED = 2

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    try:
        config = Config.from_arguments(arguments)
    except ConfigError as error:
        sys.stderr.write("".join(f"error: {one}\n" for one in error.sentences))
        return EXIT_REFUSED
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Blocked before the server's thread starts, which inherits it: the signals then wait for
    # sigwait below, wherever they arrive.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        secrets = read_secret_file(config.secret_file) if config.secret_file else []
        keys = Keys.from_secrets(secrets).registry
        behind = addresses_behind(config.host)
        said = exposure(config.host, bool(keys), config.insecure, "--insecure", behind)
        if said is not None and said.refused:
            raise ValueError(said.sentence)
        if said is not None:
            logger.warning("%s", said.sentence)
        server = BootstrapServer(
            config.host, config.port, config.lease_s, keys=keys, page=config.status_page
        )
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
