# SPDX-License-Identifier: Apache-2.0
"""The demo: the same requests to one ordinary server and through prefill + decode + router."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from bootstrap_server.admission.secret_file import write_secret_file
from cpu_serving import stats, traffic
from cpu_serving.cuda import PretendedCuda, build_driver, read_cuda_counts
from cpu_serving.devices import Devices
from cpu_serving.layerwise import Layerwise
from cpu_serving.model import make_model
from cpu_serving.options import DemoOptions, parse
from cpu_serving.overlap import Overlap, events_ignored, read_counts
from cpu_serving.pools import leaked_pages
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.reference import read_reference, write_reference
from cpu_serving.report import Drafts, Report
from cpu_serving.servers import Fleet, Pair, Server, ServerOptions, wait_ready, with_secret
from te.topology import Nic

__all__ = ["main"]

EXIT_DIFFERENT = 1
EXIT_BROKEN = 3
EXIT_INTERRUPTED = 130
ORDINARY = "requests to the ordinary server"


@dataclass(frozen=True)
class Timed:
    answers: list[traffic.Answer]
    elapsed_s: float


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-demo-"))
    code = EXIT_BROKEN
    try:
        code = _run(options, run_dir)
    except ServingError as error:
        print(f"demo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("demo: interrupted, all servers are stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if code in (EXIT_DIFFERENT, EXIT_BROKEN):
        print(f"demo: the logs are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir)
    return code


def _run(options: DemoOptions, run_dir: Path) -> int:
    devices = Devices.halves() if options.transport == "rdma" else None
    model = make_model(options.model)
    make = traffic.make_shared_requests if options.overlap else traffic.make_requests
    requests = make(options.requests, options.max_prompt_tokens, seed=options.seed)
    if options.write_reference:
        _write_reference(options, options.write_reference, run_dir, model, requests)
        return 0
    with Fleet(run_dir) as fleet:
        expected, pair = _start(options, fleet, model, requests, devices)
        before = devices.sent_bytes() if devices else 0
        with events_ignored(pair.prefill.stats_dir) if options.ignore_events else nullcontext():
            got = _timed("requests through the router", pair.router.url, requests, options)
        carried = devices.sent_bytes() - before if devices else None
        report = _report(options, pair, expected, got, carried)
        print(report.table())
        _print_errors(got.answers)
        if options.keep:
            _keep(pair)
    if options.json:
        print(report.json_line())
    return 0 if report.good else EXIT_DIFFERENT


def _write_reference(
    options: DemoOptions,
    path: Path,
    run_dir: Path,
    model: Path,
    requests: Sequence[traffic.Request],
) -> None:
    with Fleet(run_dir) as fleet:
        single = fleet.server("single", ServerOptions(model))
        with Step("starting one ordinary server") as step:
            wait_ready([single], tick=step.tick)
        timed = _timed(ORDINARY, single.url, requests, options)
    write_reference(path, options.model, requests, timed.answers, timed.elapsed_s)


def _start(
    options: DemoOptions,
    fleet: Fleet,
    model: Path,
    requests: Sequence[traffic.Request],
    devices: Devices | None,
) -> tuple[Timed, Pair]:
    """What one ordinary server answers, and the pair, ready."""
    if options.reference:
        expected = Timed(*read_reference(options.reference, options.model, requests))
        return expected, _start_pair(options, fleet, model, devices, ())
    single = fleet.server("single", ServerOptions(model))
    if len(os.sched_getaffinity(0)) == 1:  # all at once would be late there
        with Step("starting one ordinary server") as step:
            wait_ready([single], tick=step.tick)
        expected = _timed(ORDINARY, single.url, requests, options)
        single.stop()
        return expected, _start_pair(options, fleet, model, devices, ())
    pair = _start_pair(options, fleet, model, devices, [single])
    expected = _timed(ORDINARY, single.url, requests, options)
    single.process.ask_to_end()
    return expected, pair


def _start_pair(
    options: DemoOptions,
    fleet: Fleet,
    model: Path,
    devices: Devices | None,
    others: Sequence[Server],
) -> Pair:
    """The pair, ready, and so are the others."""
    prefill = _layout(
        options, model, options.prefill_tp, options.prefill_pp, devices and devices.prefill
    )
    decode = _layout(
        options, model, options.decode_tp, options.decode_pp, devices and devices.decode
    )
    if options.secret:
        path = fleet.run_dir / "secret"
        write_secret_file(path)
        prefill, decode = (with_secret(server, path) for server in (prefill, decode))
    prefill = replace(prefill, mtp=options.mtp in ("both", "prefill"))
    decode = replace(decode, mtp=options.mtp in ("both", "decode"))
    if options.pretend_cuda:
        cuda = PretendedCuda(build_driver(fleet.run_dir), seed=options.seed)
        prefill, decode = replace(prefill, cuda=cuda), replace(decode, cuda=cuda)
    pair = fleet.pair(prefill, decode, "ours" if options.router else "mini-lb")
    title = "starting one ordinary server, " if others else "starting "
    with Step(f"{title}prefill, decode and router") as step:
        wait_ready([*others, pair.prefill, pair.decode, pair.router], tick=step.tick)
    return pair


def _layout(
    options: DemoOptions, model: Path, tp: int, pp: int, nics: Sequence[Nic] | None
) -> ServerOptions:
    env = {"SGLANG_MOONCAKE_VERIFY": options.verify}
    if options.transport is not None:
        env["SGLANG_MOONCAKE_TRANSPORTS"] = options.transport
    if nics is not None:
        env["SGLANG_MOONCAKE_NICS"] = ",".join(nic.name for nic in nics)
    return ServerOptions(
        model,
        tp=tp,
        pp=pp,
        dp_attention=options.dp_attention_on(tp),
        page_size=options.page_size,
        chunked_prefill_size=options.chunked_prefill_size,
        extra_env=env,
        overlap=Overlap(seed=options.seed) if options.overlap else None,
        layerwise=Layerwise() if options.layerwise else None,
    )


def _timed(
    title: str, url: str, requests: Sequence[traffic.Request], options: DemoOptions
) -> Timed:
    started = time.monotonic()
    with Step(title) as step:
        answers = traffic.send_all(url, requests, options.concurrency, tick=step.tick)
    return Timed(answers, time.monotonic() - started)


def _report(
    options: DemoOptions, pair: Pair, expected: Timed, got: Timed, carried: int | None
) -> Report:
    finished_at = time.time()
    refused = [answer.error for answer in expected.answers if answer.error]
    if refused:
        raise ServingError(f"the ordinary server failed {len(refused)} requests: {refused[0]}")
    with Step("looking for leaked pages"):
        leaked = leaked_pages(pair.prefill) + leaked_pages(pair.decode)
    handover = stats.summarise(
        stats.collect(pair.prefill, finished_at), stats.collect(pair.decode, finished_at)
    )
    return Report(
        layout=options.layout,
        requests=options.requests,
        failed=sum(answer.error is not None for answer in got.answers),
        equal_requests=options.requests - len(traffic.compare(expected.answers, got.answers)),
        tokens=sum(len(answer.output_ids) for answer in expected.answers),
        leaked_pages=leaked,
        handover=handover,
        transport=options.transport,
        carried_bytes=carried,
        overlap=read_counts(pair.prefill.stats_dir) if options.overlap else None,
        verify=options.verify,
        layerwise=options.layerwise,
        cuda=tuple(
            read_cuda_counts(server.stats_dir, server.options.ranks, finished_at)
            for server in (pair.prefill, pair.decode)
            if server.options.cuda
        ),
        drafts=Drafts.of(got.answers) if options.mtp in ("both", "decode") else None,
        single_s=expected.elapsed_s,
        disaggregated_s=got.elapsed_s,
    )


def _print_errors(answers: Sequence[traffic.Answer]) -> None:
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    for error, count in counts.items():
        print(f"{count} failed: {error}", file=sys.stderr)


def _keep(pair: Pair) -> None:
    body = '{"text": "hello", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}'
    print(
        f"""
The servers stay up: prefill {pair.prefill.url}, decode {pair.decode.url}. Talk to them with
  curl -s {pair.router.url}/generate -H 'Content-Type: application/json' -d '{body}'
  curl -s {pair.prefill.url}/v1/loads
  tail -f {pair.prefill.process.log} {pair.decode.process.log}
Figures: {pair.prefill.stats_dir} {pair.decode.stats_dir}
Ctrl-C here stops them.""",
        flush=True,
    )
    try:
        while True:
            for part in (pair.prefill, pair.decode, pair.router):
                part.process.check_alive()
            time.sleep(1)
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
