# SPDX-License-Identifier: Apache-2.0
"""How a server is laid out, from SGLang's command line or from a few words like `tp=16 dp=4`."""

from __future__ import annotations

import difflib
import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from bootstrap_server import Topology
from sglang_mooncake.context import PREFILL_COMPLETE
from sglang_mooncake.sglang.dry_run.options import Options, ServerOptions, server_options
from sglang_mooncake.sglang.releases import MODELLESS_DRAFTS, Mode, first_lacking, too_old

__all__ = [
    "FlagError",
    "ServerFlags",
    "check_page_sizes",
    "check_release",
    "check_roles",
    "parse_flags",
]


class FlagError(ValueError):
    """A layout that no SGLang server can have; the sentence names the flag."""


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """page_size and what follows it: None where nothing was said of them."""

    topology: Topology
    ep_size: int = 1
    dcp_size: int = 1
    kv_cache_sharding: bool = False
    decode_allocation_policy: str = "early"
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    model: str | None = None
    mode: str | None = None
    backend: str | None = None
    #: Of the weights; that of the KV cache, too, unless kv_cache_dtype is another one.
    dtype: str | None = None
    #: What some releases of SGLang do not have, as far as flags tell it.
    modes: frozenset[Mode] = frozenset()


#: Word of the short form → SGLang's flags for it (sglang/srt/arg_groups/fields/parallel.py).
_FLAGS: dict[str, tuple[str, ...]] = {
    "tp": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "dp": ("--attn-dp-size", "--attention-data-parallel-size"),
    "replicas": ("--dp-size", "--dp", "--data-parallel-size"),
    "pp": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "cp": ("--attn-cp-size", "--attention-context-parallel-size"),
    "ep": ("--ep-size", "--ep", "--expert-parallel-size"),
    "dcp": ("--dcp-size", "--decode-context-parallel-size"),
    "page": ("--page-size",),
    "dtype": ("--kv-cache-dtype",),
    "policy": ("--disaggregation-decode-allocation-policy",),
}
#: The backend that this package serves.
BACKEND = "mooncake"
#: In SGLang's flag for the configuration of its linker, where that is the store's.
_OUR_LINKER = "sglang_mooncake.sglang.store.linker"
_PASSED_OVER = "passed over"
_POLICIES = ("early", PREFILL_COMPLETE)


def parse_flags(text: str) -> ServerFlags:
    """A server's layout.

    Args:
        text: SGLang's command line (flags that say nothing of the layout are passed over, those
            that no server has are refused), or words of the form
            `tp=16 dp=4 pp=1 cp=1 ep=16 page=64 dtype=bfloat16`. `tp` is the width of one replica,
            of which `dp` attention groups and `cp` take parts, as with SGLang's flags; `replicas`
            is SGLang's `--dp-size` without DP attention. `sharded=1` is --enable-kv-cache-sharding,
            `policy` --disaggregation-decode-allocation-policy.

    Raises:
        FlagError: not to be understood, or sizes that do not fit each other.
    """
    given = _from_command_line(text) if "--" in text else _from_words(text)
    model, dtype = given.pop("model", None), given.pop("dtype", None)
    mode, backend = given.pop("mode", None), given.pop("backend", None)
    weights_dtype = given.pop("weights_dtype", None)
    drafts, linker = given.pop("drafts", None), given.pop("linker", None)
    has_hisparse = given.pop("hisparse", None) is not None
    policy = given.pop("policy", None) or "early"
    if policy not in _POLICIES:
        raise FlagError(f"policy={policy} ({_FLAGS['policy'][0]}): {' or '.join(_POLICIES)}")
    sharded = given.pop("sharded", None)
    sizes = {name: _size(name, value) for name, value in given.items() if value is not None}
    page_size = sizes.pop("page", None)
    topology = _topology(sizes)
    on = {
        Mode.DRAFTS: drafts not in MODELLESS_DRAFTS,
        Mode.LINKER: _OUR_LINKER in (linker or ""),
        Mode.DCP: sizes.get("dcp", 1) > 1,
        Mode.SHARDING: sharded == "1",
        Mode.HISPARSE: has_hisparse,
    }
    flags = ServerFlags(
        topology,
        sizes.get("ep", 1),
        sizes.get("dcp", 1),
        sharded == "1",
        policy,
        page_size,
        dtype,
        model,
        mode,
        backend,
        weights_dtype,
        frozenset(mode for mode, is_on in on.items() if is_on),
    )
    _check(flags)
    return flags


def check_roles(prefill: ServerFlags, decode: ServerFlags) -> None:
    """Raises FlagError if a command line is that of another role, or of another backend."""
    for role, flags in (("prefill", prefill), ("decode", decode)):
        if flags.mode not in (None, role):
            raise FlagError(f"--{role}: this command line has --disaggregation-mode {flags.mode}")
        if flags.backend not in (None, BACKEND):
            raise FlagError(
                f"--{role}: this command line has --disaggregation-transfer-backend "
                f"{flags.backend}; both servers need {BACKEND}"
            )


def check_release(role: str, flags: ServerFlags, version: str) -> None:
    """Raises FlagError, with the sentence that ends such a server, if this release of SGLang is too
    old, or has not got a mode that the flags ask for."""
    problem = too_old(version) or first_lacking(flags.modes, version)
    if problem is not None:
        raise FlagError(f"--{role}: {problem}")


def check_page_sizes(prefill: ServerFlags, decode: ServerFlags) -> None:
    """Raises FlagError if only one of the two command lines names its page size."""
    if (prefill.page_size is None) == (decode.page_size is None):
        return
    one, other = ("prefill", "decode") if prefill.page_size else ("decode", "prefill")
    raise FlagError(
        f"--{one} has a page size of {prefill.page_size or decode.page_size}, and --{other} names "
        "none: SGLang chooses one there, which is 1 with most models and attention backends. Give "
        "both servers the same --page-size, or say here what it chooses: --page-size"
    )


def _check(flags: ServerFlags) -> None:
    """What SGLang itself refuses (arg_groups/attention_hook.py, pd_disaggregation_hook.py)."""
    sizes = flags.topology
    if sizes.tp_size % flags.dcp_size:
        raise FlagError(
            f"--dcp-size {flags.dcp_size} does not divide an attention TP size of {sizes.tp_size}"
        )
    alone = (sizes.tp_size, sizes.cp_size, sizes.pp_size) == (1, 1, 1)
    if flags.decode_allocation_policy == PREFILL_COMPLETE and not alone:
        raise FlagError(
            f"{_FLAGS['policy'][0]} {PREFILL_COMPLETE} is for servers with one rank in each DP "
            "group: SGLang has it without TP (but with DP attention), CP and stages alone"
        )


def _from_words(text: str) -> dict[str, str | None]:
    given: dict[str, str | None] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals or (name not in _FLAGS and name != "sharded"):
            raise FlagError(
                f"{word!r} is not understood: give words like tp=16 dp=4 "
                f"({', '.join(_FLAGS)}, sharded), or SGLang's own flags"
            )
        if name in given:
            raise FlagError(f"{name} is given twice")
        given[name] = value
    if given.get("sharded") not in (None, "0", "1"):
        raise FlagError(f"sharded={given['sharded']}: give 1 for --enable-kv-cache-sharding, or 0")
    return given


class _Parser(Options):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def _from_command_line(text: str) -> dict[str, str | None]:
    try:
        words = _of_server(shlex.split(text))
    except ValueError as error:
        raise FlagError(f"{text!r} is no command line: {error}") from error
    options = server_options()
    known, left = _parser(options).parse_known_args(words)
    for word in left:
        if word.startswith("-"):
            raise FlagError(_unknown(word, options))
    given: dict[str, str | None] = vars(known)
    given.pop(_PASSED_OVER)
    if given.pop("enable_dp_attention"):
        # Deprecated in SGLang 0.5.23, where it still turns --dp-size into --attn-dp-size
        # (sglang/srt/arg_groups/parallel_hook.py).
        if given["dp"] is not None and given["replicas"] is not None:
            raise FlagError("--enable-dp-attention with both --dp-size and --attn-dp-size")
        given["dp"] = given["dp"] or given["replicas"]
        given["replicas"] = None
    return given


def _of_server(words: Sequence[str]) -> list[str]:
    """The words behind the program: `python -m sglang.launch_server` or `sglang serve`. A flag may
    have such a word as its value."""
    for number, word in enumerate(words):
        if word.startswith("--"):
            break
        if word in ("sglang.launch_server", "serve"):
            return list(words[number + 1 :])
    return list(words)


@functools.cache  # It is the same for each command line, and has hundreds of options.
def _parser(options: ServerOptions) -> _Parser:
    """Reads abbreviations as SGLang's does, so it has all of its options."""
    parser = _Parser(add_help=False)
    for name, flags in _FLAGS.items():
        parser.add_argument(*flags, dest=name)
    parser.add_argument("--model-path", "--model", dest="model")
    parser.add_argument("--dtype", dest="weights_dtype")
    parser.add_argument("--disaggregation-mode", dest="mode")
    parser.add_argument("--disaggregation-transfer-backend", dest="backend")
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--speculative-algorithm", dest="drafts")
    parser.add_argument("--unified-cache-external-linker-config", dest="linker")
    parser.add_argument("--enable-hisparse", dest="hisparse", action="store_const", const="1")
    parser.add_argument(
        "--enable-kv-cache-sharding", dest="sharded", action="store_const", const="1"
    )
    for option in sorted(options.names - parser.names()):
        parser.add_argument(option, nargs="*", dest=_PASSED_OVER)
    return parser


def _unknown(word: str, options: ServerOptions) -> str:
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, sorted(options.names), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name} is no flag of {options.source}{hint}"


def _size(name: str, value: str) -> int:
    number = int(value) if value.isdecimal() else 0
    if not 1 <= number <= 65_536:
        raise FlagError(f"{name}={value} ({_FLAGS[name][0]}): give a number from 1 to 65536")
    return number


def _topology(sizes: dict[str, int]) -> Topology:
    tp, dp, cp = sizes.get("tp", 1), sizes.get("dp", 1), sizes.get("cp", 1)
    replicas = sizes.get("replicas", 1)
    if dp > 1 and replicas > 1:
        raise FlagError(
            f"--attn-dp-size {dp} and --dp-size {replicas}: SGLang runs no DP attention inside "
            "replicas, one of the two must be 1"
        )
    if tp % (dp * cp):
        raise FlagError(
            f"--tp-size {tp} cannot be split into --attn-dp-size {dp} times --attn-cp-size {cp} "
            "equal groups"
        )
    try:
        return Topology(dp * replicas, cp, tp // (dp * cp), sizes.get("pp", 1))
    except ValueError as error:
        raise FlagError(str(error)) from error
