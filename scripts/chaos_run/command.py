# SPDX-License-Identifier: Apache-2.0
"""`scripts/chaos`: from arguments to a verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cpu_serving.namespaces import NoNetwork
from cpu_serving.nursery import Nursery
from cpu_serving.processes import ServingError, leaves
from cpu_serving.servers import Fleet, base_environment

from chaos_run.backends import STOCK
from chaos_run.hosts import Hosts
from chaos_run.options import ChaosOptions, parse
from chaos_run.peer import NoPeer, environment_of
from chaos_run.report import as_json, svg, text
from chaos_run.run import Run
from chaos_run.schedule import REGISTRY, SERVERS

__all__ = ["main"]

EXIT_BAD = 1
EXIT_UNUSABLE = 2
EXIT_BROKEN = 3
EXIT_INTERRUPTED = 130
#: A prefill server waits so long for a decode server to ask (SGLang: 300 s). The mini-lb does not
#: tell it that the decode half of a request has failed.
ASKED_WITHIN_S = 30


def main(argv: Sequence[str]) -> int:
    """0: nothing that must not be. 1: something. 2: not possible here. 3: a server did not come up
    or did not recover."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        peer = environment_of(options.backend) if options.backend in STOCK else None
        hosts = Hosts((*SERVERS, REGISTRY))
    except (NoNetwork, NoPeer) as error:
        print(f"chaos: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = str(ASKED_WITHIN_S)
    if peer is not None:
        os.environ.update(peer)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-chaos-"))
    code = EXIT_BROKEN
    try:
        code = _run(options, hosts, run_dir)
    except* ServingError as errors:
        for failed in leaves(errors):
            print(f"chaos: {failed}", file=sys.stderr)
    except* KeyboardInterrupt:
        print("chaos: interrupted, all servers are stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if code in (EXIT_BAD, EXIT_BROKEN):
        print(f"chaos: the logs are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: ChaosOptions, hosts: Hosts, run_dir: Path) -> int:
    with (
        Nursery(base_environment(), run_dir / "nursery.log") as nursery,
        Fleet(run_dir, nursery) as fleet,
    ):
        result = Run(options, hosts, fleet).result()
    print(text(result))
    if options.json:
        options.json.write_text(json.dumps(as_json(result), indent=1) + "\n")
    if options.plot:
        options.plot.write_text(svg(result))
    return EXIT_BAD if result.faults_found() else 0
