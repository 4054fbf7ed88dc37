# SPDX-License-Identifier: Apache-2.0
"""The command line of ``sglang-mooncake router``. Pure.

Options have the names that they have at SGLang's own routers, so that one word of a command line
changes. Those of its router that would change nothing here are taken and named in the log; options
that are to protect something are not taken, since nothing would protect it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import msgspec

from bootstrap_server import BootstrapError, split_address
from sglang_mooncake.router.addresses import Place, host_key, place_of
from te.arguments import number, whole

__all__ = [
    "CACHE_AWARE",
    "DESCRIPTION",
    "POLICIES",
    "Options",
    "OptionsError",
    "add_arguments",
    "options_of",
]

DESCRIPTION: Final = """\
Takes clients' requests for a prefill and a decode server, in the place of SGLang's mini-lb. Options
have the names that they have there:

  sglang-mooncake router --pd-disaggregation --host 0.0.0.0 --port 8000 \\
      --prefill http://10.0.0.1:30000 8998 --prefill http://10.0.0.2:30000 8998 \\
      --decode http://10.0.0.3:30000
  sglang-mooncake router --port 8000 --registry 10.0.0.9:8998
"""

CACHE_AWARE: Final = "cache_aware"
POLICIES: Final = (CACHE_AWARE, "power_of_two", "random", "round_robin")
#: Options of SGLang's routers that change nothing here, and how many values each has.
_WITHOUT_EFFECT: Final[dict[str, int]] = {
    "--mini-lb": 0,
    "--pd-disaggregation": 0,
    "--cache-threshold": 1,
    "--balance-abs-threshold": 1,
    "--balance-rel-threshold": 1,
    "--eviction-interval-secs": 1,
    "--max-tree-size": 1,
    "--worker-startup-timeout-secs": 1,
    "--worker-startup-check-interval": 1,
    "--prometheus-host": 1,
    "--prometheus-port": 1,
    "--log-dir": 1,
}
#: They say what this router is, in any case.
_MATTERS_OF_COURSE: Final = frozenset({"--mini-lb", "--pd-disaggregation"})


_SECONDS: Final = number(0.01, 1e6, "s")
_PORT: Final = whole(0, 65_535)
_COUNT: Final = whole(1)
#: Each turn looks at all requests that wait: 0.1 s where 20,000 do.
QUEUE_MAX: Final = 10_000


class OptionsError(ValueError):
    """The options cannot be served: the sentence names the one to change."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for. Times are in seconds."""

    host: str
    port: int
    #: Addresses of registries, which list servers.
    registries: tuple[str, ...]
    secret_file: str | None
    #: Settings of the store that prefill servers load from; None: they have none.
    store: str | None
    #: The directory of the model, whose tokenizer makes tokens of texts; None: texts are compared.
    tokenizer: str | None
    #: URLs of prefill servers, each with the port of its registry; None is the server's setting.
    prefill: tuple[tuple[str, int | None], ...]
    decode: tuple[str, ...]
    prefill_policy: str
    decode_policy: str
    request_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    #: So many failures, one after another, make a server ill.
    health_failures: int
    #: How many requests may be under way; None is any number.
    max_requests: int | None
    #: How many further ones may wait for those, and for how long.
    queue_size: int
    queue_timeout_s: float
    #: The header that names a request's tenant; None: all are of one.
    tenant_header: str | None
    #: Of requests that name none.
    default_priority: int
    #: Whether those with low numbers come first.
    is_low_first: bool
    #: A request whose first token is expected later is refused; None: none is.
    ttft_max_s: float | None
    #: A request whose tokens are expected further apart is refused; None: none is.
    tbt_max_s: float | None
    max_body_bytes: int
    retries: int
    api_key: str | None
    log_level: str
    #: Options that were given and change nothing.
    without_effect: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("--host", default="0.0.0.0", help="address to listen on (0.0.0.0)")
    add(
        "--port",
        type=_PORT,
        default=30_000,
        metavar="N",
        help="port to listen on (30000)",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of what is logged (info)",
    )
    _add_servers(parser)
    _add_choice(parser)
    _add_health(parser)
    _add_limits(parser)
    for name, count in _WITHOUT_EFFECT.items():
        action = "store_true" if count == 0 else "store"
        add(name, action=action, default=None, help=argparse.SUPPRESS)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("servers").add_argument
    add(
        "--prefill",
        nargs="+",
        action="append",
        default=[],
        metavar=("URL", "PORT"),
        help="a prefill server, and its --disaggregation-bootstrap-port; for each server once more",
    )
    add(
        "--decode",
        action="append",
        default=[],
        metavar="URL",
        help="a decode server; for each server once more",
    )
    add(
        "--registry",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a registry, whose servers join and leave while the router runs: that of a prefill"
        " server (--disaggregation-bootstrap-port), or one that runs by itself; for each"
        " one once more",
    )
    add(
        "--secret-file",
        metavar="PATH",
        help="the deployment's secret: for registries and the store, where they ask for it; those"
        " who register caches have to prove it then",
    )
    add("--api-key", metavar="KEY", help="for servers, where a client brings no key of its own")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("choice of servers").add_argument
    add(
        "--policy",
        choices=POLICIES,
        default=CACHE_AWARE,
        help="how servers are chosen (cache_aware: the one that is expected to have the first token"
        " first, by its cache and its queue)",
    )
    add("--prefill-policy", choices=POLICIES, help="that of prefill servers (--policy)")
    add("--decode-policy", choices=POLICIES, help="that of decode servers (--policy)")
    add(
        "--store",
        metavar="JSON",
        help="the store that the prefill servers load from: its settings there, such as"
        """ '{"index": "redis://10.0.0.9:6379"}'; '{}' for this host's (cache_aware alone; none)""",
    )
    add(
        "--tokenizer-path",
        metavar="DIR",
        help="the directory of the model: its tokenizer and chat template tell the tokens of texts,"
        " by which servers and the store know their caches (texts are compared as they are)",
    )


def _add_health(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("health of servers").add_argument
    add(
        "--health-check-interval-secs",
        type=_SECONDS,
        default=10.0,
        metavar="S",
        help="how often each server is asked for its health (10); one that is ill each second",
    )
    add(
        "--health-check-timeout-secs",
        type=_SECONDS,
        default=5.0,
        metavar="S",
        help="a server that does not answer for so long has failed (5)",
    )
    add(
        "--health-failure-threshold",
        type=_COUNT,
        default=3,
        metavar="N",
        help="so many failures, one after another, make a server ill (3)",
    )
    add("--disable-retries", action="store_true", help="try no request a second time")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add(
        "--request-timeout-secs",
        type=_SECONDS,
        default=1800.0,
        metavar="S",
        help="a request ends after so long at the latest (1800)",
    )
    add(
        "--max-concurrent-requests",
        type=_count_or_any,
        metavar="N",
        help="further requests wait for their turn (-1: any number are taken)",
    )
    add(
        "--queue-size",
        type=whole(0, QUEUE_MAX),
        default=100,
        metavar="N",
        help=f"so many may wait, {QUEUE_MAX:,} at most; where there are more, one is answered with"
        " status 429 (100)",
    )
    add(
        "--queue-timeout-secs",
        type=_SECONDS,
        default=60.0,
        metavar="S",
        help="one that has waited for so long is answered with status 429 (60)",
    )
    add(
        "--tenant-header",
        metavar="NAME",
        help="the header that names the tenant of a request: tenants whose requests wait get equal "
        "shares, counted in bytes of requests (all are of one tenant)",
    )
    add(
        "--default-priority-value",
        type=int,
        default=0,
        metavar="N",
        help="priority of requests without one (0): of those that wait the highest is served first",
    )
    add(
        "--schedule-low-priority-values-first",
        action="store_true",
        help="the lowest priority is served first, as with SGLang's option",
    )
    add(
        "--max-ttft-secs",
        type=_SECONDS,
        metavar="S",
        help="requests whose first token is expected later, because of those before them, are "
        "answered with status 429 (cache_aware alone; all are taken)",
    )
    add(
        "--max-tbt-secs",
        type=_SECONDS,
        metavar="S",
        help="requests are answered with status 429 while tokens (TBT) of every decode server are "
        "expected further apart (all are taken)",
    )
    add(
        "--max-payload-size",
        type=_COUNT,
        default=512 << 20,
        metavar="BYTES",
        help="longest body of a request (536870912)",
    )


def options_of(parsed: argparse.Namespace) -> Options:
    """Raises ``OptionsError``."""
    prefill = tuple(_prefill(words) for words in parsed.prefill)
    decode = tuple(_url("--decode", url) for url in parsed.decode)
    registries: dict[tuple[str, int], str] = {}
    for address in parsed.registry:
        registries.setdefault(_registry(address), address)
    if not registries and not (prefill and decode):
        missing = "--decode" if prefill else "--prefill"
        raise OptionsError(
            f"{missing} is missing: name at least one server of each kind, or a --registry"
        )
    _once([*(url for url, _ in prefill), *decode])
    if parsed.tenant_header is not None and parsed.max_concurrent_requests in (None, -1):
        raise OptionsError(
            "--tenant-header shares out what --max-concurrent-requests bounds: give that as well"
        )
    is_cache_aware = (parsed.prefill_policy or parsed.policy) == CACHE_AWARE
    if parsed.store is not None and not is_cache_aware:
        raise OptionsError("--store: only the policy cache_aware looks for caches (--policy)")
    if parsed.max_ttft_secs is not None and not is_cache_aware:
        raise OptionsError("--max-ttft-secs: only the policy cache_aware expects times (--policy)")
    return Options(
        host=parsed.host,
        port=parsed.port,
        registries=tuple(registries.values()),
        secret_file=parsed.secret_file,
        store=parsed.store,
        tokenizer=parsed.tokenizer_path,
        prefill=prefill,
        decode=decode,
        prefill_policy=parsed.prefill_policy or parsed.policy,
        decode_policy=parsed.decode_policy or parsed.policy,
        request_timeout_s=parsed.request_timeout_secs,
        health_interval_s=parsed.health_check_interval_secs,
        health_timeout_s=parsed.health_check_timeout_secs,
        health_failures=parsed.health_failure_threshold,
        max_requests=None
        if parsed.max_concurrent_requests in (None, -1)
        else parsed.max_concurrent_requests,
        queue_size=parsed.queue_size,
        queue_timeout_s=parsed.queue_timeout_secs,
        tenant_header=parsed.tenant_header,
        default_priority=parsed.default_priority_value,
        is_low_first=parsed.schedule_low_priority_values_first,
        ttft_max_s=parsed.max_ttft_secs,
        tbt_max_s=parsed.max_tbt_secs,
        max_body_bytes=parsed.max_payload_size,
        retries=0 if parsed.disable_retries else 1,
        api_key=parsed.api_key,
        log_level=parsed.log_level,
        without_effect=tuple(
            name
            for name in _WITHOUT_EFFECT
            if name not in _MATTERS_OF_COURSE
            and getattr(parsed, name[2:].replace("-", "_")) is not None
        ),
    )


def _prefill(words: Sequence[str]) -> tuple[str, int | None]:
    if len(words) > 2:
        raise OptionsError(f"--prefill takes a URL and a port, not {' '.join(words)!r}")
    url = _url("--prefill", words[0])
    port = words[1].lower() if len(words) > 1 else "none"
    if port == "none":
        return url, None
    try:
        return url, whole(1, 65_535)(port)
    except argparse.ArgumentTypeError as error:
        raise OptionsError(f"--prefill {url}: {error}, nor the word none") from error


def _once(urls: Sequence[str]) -> None:
    """Raises ``OptionsError`` if two of them are of one server."""
    seen: dict[Place, str] = {}
    for url in urls:
        place = place_of(url)
        if place in seen:
            twice = url if seen[place] == url else f"{seen[place]}, also as {url},"
            raise OptionsError(f"{twice} is named twice: each server once, as prefill or as decode")
        seen[place] = url


def _url(option: str, text: str) -> str:
    """Without the slash at the end."""
    try:
        parts = urlsplit(text)
        usable = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not (parts.query or parts.fragment or "@" in parts.netloc)
        )
    except ValueError:  # A port that is no number, half a bracket.
        usable = False
    if not usable:
        raise OptionsError(f"{option} {text!r} is no URL such as http://10.0.0.1:30000")
    return text.rstrip("/")


def _registry(address: str) -> tuple[str, int]:
    """The same for all spellings."""
    try:
        host, port = split_address(address)
    except BootstrapError as error:
        raise OptionsError(f"--registry {address!r} is not of the form HOST:PORT") from error
    return host_key(host), port


def _count_or_any(text: str) -> int:
    return -1 if text == "-1" else _COUNT(text)
