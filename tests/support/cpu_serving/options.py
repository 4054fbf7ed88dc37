# SPDX-License-Identifier: Apache-2.0
"""The demo's command line. A bad argument is answered with one sentence and exit status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import Parser, count

from cpu_serving.architectures import ARCHITECTURES, HEADS, LAYERS, MAX_POSITIONS, NEW_TOKENS
from cpu_serving.variants import VARIANTS

__all__ = ["TRANSPORTS", "DemoOptions", "parse"]

#: Those of `te.config`, which has to be compiled before it can be asked.
TRANSPORTS = ("samehost", "rdma", "tcp")
#: Most prompts are longer: their chunks are sent as cached prefixes of the next ones.
OVERLAP_CHUNK = 256
MTP_MODEL = "deepseek-v3"
LAYERWISE_MODEL = "llama-deep"


@dataclass(frozen=True)
class DemoOptions:
    requests: int
    concurrency: int
    prefill_tp: int
    decode_tp: int
    prefill_pp: int
    decode_pp: int
    dp_attention: bool
    page_size: int
    chunked_prefill_size: int | None
    transport: str | None
    #: A secret is made for all servers.
    secret: bool
    #: This project's router instead of SGLang's mini-lb.
    router: bool
    #: How much of the KV cache is compared by digests.
    verify: str
    overlap: bool
    layerwise: bool
    ignore_events: bool
    pretend_cuda: bool
    #: "both", "decode" or "prefill": which servers draft.
    mtp: str | None
    model: str
    max_prompt_tokens: int
    seed: int
    keep: bool
    json: bool
    #: A file of what one ordinary server answered, to compare with or to write.
    reference: Path | None
    write_reference: Path | None

    @property
    def layout(self) -> str:
        prefill = self._server(self.prefill_tp, self.prefill_pp)
        decode = self._server(self.decode_tp, self.decode_pp)
        pages = f"page size {self.page_size}"
        if self.chunked_prefill_size:
            pages += f", chunks of {self.chunked_prefill_size}"
        if self.secret:
            pages += ", with a secret"
        if self.router:
            pages += ", this project's router"
        if self.verify != "off":
            pages += f", digests of {self.verify}"
        if self.overlap:
            pages += ", overlap scheduling"
        if self.layerwise:
            pages += ", layer by layer"
        if self.mtp:
            pages += f", MTP on {self.mtp}"
        if self.pretend_cuda:
            pages += ", pools said to be CUDA memory"
        return f"{self.model}: prefill {prefill} -> decode {decode}, {pages}"

    def dp_attention_on(self, tp: int) -> bool:
        """Whether a server of this width runs it: a single rank has nobody to share with."""
        return self.dp_attention and tp > 1

    def _server(self, tp: int, pp: int) -> str:
        parts = [f"tp{tp}", f"dp{tp}" if self.dp_attention_on(tp) else "", f"pp{pp}" * (pp > 1)]
        return " ".join(part for part in parts if part)


def parse(argv: Sequence[str]) -> DemoOptions:
    parser = _build_parser()
    args = parser.parse_args(argv)
    default_tp = 2 if args.dp_attention else 1
    options = DemoOptions(
        requests=args.requests,
        concurrency=args.concurrency,
        prefill_tp=args.prefill_tp or default_tp,
        decode_tp=args.decode_tp or default_tp,
        prefill_pp=args.prefill_pp,
        decode_pp=args.decode_pp,
        dp_attention=args.dp_attention,
        page_size=args.page_size,
        chunked_prefill_size=args.chunked_prefill_size or (OVERLAP_CHUNK if args.overlap else None),
        transport=args.transport,
        secret=args.secret,
        router=args.router,
        verify=args.verify,
        overlap=args.overlap,
        layerwise=args.layerwise,
        ignore_events=args.ignore_events,
        pretend_cuda=args.pretend_cuda,
        mtp=args.mtp,
        model=args.model or _default_model(args),
        max_prompt_tokens=args.max_prompt_tokens,
        seed=args.seed,
        keep=args.keep,
        json=args.json,
        reference=args.reference,
        write_reference=args.write_reference,
    )
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options


def _default_model(args: argparse.Namespace) -> str:
    if args.mtp:
        return MTP_MODEL
    if args.layerwise and not args.dp_attention:
        return LAYERWISE_MODEL
    return "qwen3" if args.dp_attention else "llama"


def _build_parser() -> Parser:
    parser = Parser(
        "scripts/demo",
        "One ordinary SGLang server against prefill + decode + router through this "
        "project, all on the CPU with a tiny model: are the tokens equal?",
        epilog="As the first word, one of these shows something else, and has options of its own:"
        f" {', '.join(VARIANTS)} (scripts/demo --store --help).",
    )
    add = parser.add_argument
    add("--requests", type=count, default=50, metavar="N", help="how many (50)")
    add("--concurrency", type=count, default=16, metavar="C", help="how many at a time (16)")
    add("--prefill-tp", type=count, metavar="T", help="TP ranks of the prefill server (1)")
    add("--decode-tp", type=count, metavar="T", help="TP ranks of the decode server (1)")
    add("--prefill-pp", type=count, default=1, metavar="P", help="its pipeline stages (1)")
    add("--decode-pp", type=count, default=1, metavar="P", help="those of decode (1)")
    add(
        "--dp-attention",
        action="store_true",
        help="DP attention over the ranks of each server (2, unless told otherwise)",
    )
    add("--page-size", type=count, default=1, metavar="P", help="tokens per KV page (1)")
    add("--chunked-prefill-size", type=count, metavar="N", help="prefill in chunks of N tokens")
    add(
        "--verify",
        choices=("off", "sample", "all"),
        default="off",
        help="compare the KV cache by digests when it has arrived (off)",
    )
    add(
        "--overlap",
        action="store_true",
        help="overlap scheduling on prefill, with events that happen late, prompts that share "
        f"prefixes, and chunks of {OVERLAP_CHUNK} unless told otherwise",
    )
    add(
        "--layerwise",
        action="store_true",
        help="KV leaves layer by layer while the prefill server computes, and is garbage until its "
        "layer is written",
    )
    add(
        "--ignore-events",
        action="store_true",
        help="with --overlap, the negative control: sends wait for no event, so tokens must differ",
    )
    add(
        "--pretend-cuda",
        action="store_true",
        help="a driver without a GPU, whose copies are late, reports the KV pools as CUDA memory",
    )
    add(
        "--mtp",
        nargs="?",
        const="both",
        choices=("both", "decode", "prefill"),
        help=f"speculative decoding with the draft layer of {MTP_MODEL}, on both servers or one",
    )
    add("--transport", choices=TRANSPORTS, help="this one or none (default: the best that works)")
    add("--secret", action="store_true", help="make a secret that both servers get")
    add(
        "--router",
        action="store_true",
        help="this project's router in the place of SGLang's mini-lb",
    )
    add(
        "--model",
        choices=sorted(ARCHITECTURES),
        help="tiny model (llama; llama-deep layer by layer; qwen3 with DP attention)",
    )
    add(
        "--max-prompt-tokens",
        type=count,
        default=1500,
        metavar="N",
        help="longest prompt (1500)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add("--keep", action="store_true", help="leave the servers up until Ctrl-C")
    add("--json", action="store_true", help="last line of stdout is one JSON object")
    add(
        "--write-reference",
        type=Path,
        metavar="FILE",
        help="only ask the ordinary server, and keep its answers",
    )
    add(
        "--reference",
        type=Path,
        metavar="FILE",
        help="compare with the answers in this file; start no ordinary server",
    )
    return parser


def _problem(options: DemoOptions) -> str | None:
    for flag, tp in (("--prefill-tp", options.prefill_tp), ("--decode-tp", options.decode_tp)):
        if HEADS % tp:
            return f"{flag} {tp}: the tiny models have {HEADS} heads, which {tp} ranks cannot share"
    for flag, pp in (("--prefill-pp", options.prefill_pp), ("--decode-pp", options.decode_pp)):
        if pp > LAYERS:
            return f"{flag} {pp}: the tiny models have {LAYERS} layers"
    if options.decode_pp not in (1, options.prefill_pp):
        return (
            f"--decode-pp {options.decode_pp}: give 1 or that of prefill, {options.prefill_pp} "
            "(--prefill-pp)"
        )
    if options.dp_attention and options.model.startswith("llama"):
        return f"--dp-attention: SGLang has it for qwen3 and deepseek, not for {options.model}"
    if options.dp_attention and max(options.prefill_tp, options.decode_tp) < 2:
        return "--dp-attention needs 2 ranks on one of the servers (--prefill-tp, --decode-tp)"
    if options.mtp and options.model != MTP_MODEL:
        return f"--mtp: {options.model} has no draft layer, {MTP_MODEL} has one (--model)"
    if options.mtp and options.prefill_pp > 1:
        return "--mtp with --prefill-pp: no tiny model has both"
    if options.mtp and options.overlap:
        return "--mtp with --overlap: SGLang has no overlap scheduling of drafts on a CPU"
    if options.ignore_events and not options.overlap:
        return "--ignore-events: there are no events without --overlap"
    if options.overlap and options.prefill_pp > 1:
        return "--overlap: SGLang has no overlap scheduling with pipeline stages (--prefill-pp)"
    if options.layerwise and options.prefill_pp > 1:
        return "--layerwise: with pipeline stages (--prefill-pp) KV leaves as a whole"
    longest = MAX_POSITIONS - NEW_TOKENS
    if options.max_prompt_tokens > longest:
        return f"--max-prompt-tokens {options.max_prompt_tokens}: the tiny models hold {longest}"
    if options.chunked_prefill_size and options.chunked_prefill_size % options.page_size:
        return (
            f"--chunked-prefill-size {options.chunked_prefill_size} is no multiple of "
            f"--page-size {options.page_size}"
        )
    if options.reference and options.write_reference:
        return "--reference and --write-reference together: one reads what the other writes"
    if options.seed < 0:
        return f"--seed {options.seed} is negative"
    return None


if __name__ == "__main__":
    words = sys.argv[1:]
    if words and words[0] in VARIANTS:
        VARIANTS[words[0]](words[1:])
    else:
        parse(words)
