# SPDX-License-Identifier: Apache-2.0
"""What requests to SGLang's servers and their answers look like. Pure.

Only what the router must know of a request is decoded: all else of its JSON is passed on byte by
byte, as ``msgspec.Raw``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from sglang_mooncake.router.servers import Role

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DONE_EVENT",
    "GENERATE",
    "ROOM_BITS",
    "Body",
    "RequestError",
    "Told",
    "body_of",
    "error_event",
    "error_in",
    "event_json",
    "events_in",
    "for_pair",
    "given",
    "index_of",
    "is_batch",
    "is_one",
    "is_single",
    "member",
    "priority_of",
    "rank_of",
    "room_for",
    "told_in",
    "wants_input_logprobs",
    "wants_stream",
    "with_input_logprobs",
]

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

#: A room is a number of 63 bits. A server counts on from it for the requests of a batch, so that
#: there must be room above.
ROOM_BITS: Final = 62
DONE_EVENT: Final = b"data: [DONE]\n\n"

Body: TypeAlias = dict[str, msgspec.Raw]

_NUMBER: Final = msgspec.json.Decoder(int | None)
_BODY: Final = msgspec.json.Decoder(Body)
_ENCODER: Final = msgspec.json.Encoder()
#: Where a prompt may stand in a request.
_PROMPTS: Final = ("text", "prompt", "input_ids", "input_embeds")
#: Where a DP rank of both servers may be named, and one of the prefill server alone. The first one
#: counts.
_RANKS: Final = ("routed_dp_rank", "data_parallel_rank")
_PREFILL_RANKS: Final = (*_RANKS, "disagg_prefill_dp_rank")
_TRUE: Final = b"true"
_NULL: Final = b"null"


class RequestError(ValueError):
    """The client's request cannot be passed on: its sentence says why."""


class _Count(msgspec.Struct):
    """The parts of sampling parameters that say how many answers are asked for."""

    n: int | None = None


class _Finish(msgspec.Struct):
    type: str | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _Finish | str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str | None = None
    code: int | str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta | None = None
    usage: _Usage | None = None
    error: _Error | str | None = None


class _Index(msgspec.Struct):
    index: int = 0


class Told(msgspec.Struct, frozen=True):
    """What a server told of one or several requests; None where it told nothing."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    #: Of how many requests these are the sums.
    count: int = 1


_ANSWERS: Final = msgspec.json.Decoder(_Answer | list[_Answer])


def body_of(raw: bytes) -> Body:
    """The members of a request's JSON object. ``RequestError`` if it is none."""
    try:
        # What is passed on without a look is not looked at here either, but for its encoding.
        return _BODY.decode(raw.decode())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request is no JSON object: {error}") from error
    except RecursionError as error:
        raise RequestError("the request's JSON is nested too deeply") from error


def for_pair(body: Mapping[str, msgspec.Raw], host: str, port: int | None, room: int) -> bytes:
    """The request as both servers of a pair get it.

    Args:
        host: of the prefill server's registry; an IPv6 address in brackets.
        port: of that registry; None is the server's own setting.
        room: for the first request of a batch; the servers count on for the others, and for the
            further answers (``n``) to each of them.
    """
    added = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    return _ENCODER.encode({**body, **added})


def wants_stream(body: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the answer shall come token by token."""
    return member(body, "stream") == _TRUE


def wants_input_logprobs(body: Mapping[str, msgspec.Raw], path: str) -> bool:
    """Whether the answer has log-probabilities of the prompt, which the prefill server alone has
    computed."""
    if path != GENERATE:
        return False
    asked = body.get("return_logprob")
    return asked is not None and _TRUE in bytes(asked)


def rank_of(body: Mapping[str, msgspec.Raw], role: Role) -> int | None:
    """The DP rank of the prefill or the decode server that the client has named."""
    for name in _PREFILL_RANKS if role == "prefill" else _RANKS:
        if name in body and (rank := _number(body, name)) is not None:
            return rank
    return None


def priority_of(body: Mapping[str, msgspec.Raw]) -> int | None:
    """The priority that the client has named."""
    return _number(body, "priority")


def room_for(room: int, rank: int, ranks: int) -> int:
    """A room near ``room`` by which a prefill server with so many DP ranks takes that one, and the
    decode server knows which it is (SGLang's ``follow_bootstrap_room``)."""
    return room - room % ranks + rank


def is_single(body: Mapping[str, msgspec.Raw]) -> bool:
    """Whether it asks for one answer to one prompt, and has no name (``rid``) of the client's.

    SGLang aborts all requests whose names begin with the one that it is told; so the router may ask
    for that where the name is its own.
    """
    return not given(body, "rid") and is_one(body)


def is_one(body: Mapping[str, msgspec.Raw]) -> bool:
    """Whether it asks for one answer to one prompt."""
    if any(is_batch(body, name) for name in _PROMPTS):
        return False
    counts = [_number(body, "n")]
    if given(body, "sampling_params"):
        counts.append(_count_in(body["sampling_params"]))
    return all(count in (None, 1) for count in counts)


def is_batch(body: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Whether the member holds several prompts."""
    value = member(body, name)
    return value.startswith(b"[") and value[1:].lstrip()[:1] in (b'"', b"[")


def given(body: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Whether the member is there, and not null."""
    return member(body, name) not in (b"", _NULL)


def member(body: Mapping[str, msgspec.Raw], name: str) -> bytes:
    """The member's JSON; nothing where it is not there."""
    value = body.get(name)
    return b"" if value is None else bytes(value)


def _number(body: Mapping[str, msgspec.Raw], name: str) -> int | None:
    try:
        return _NUMBER.decode(body[name]) if name in body else None
    except msgspec.DecodeError:
        return None  # A server says what is wrong with it.


def _count_in(parameters: msgspec.Raw) -> int | None:
    try:
        return msgspec.json.decode(parameters, type=_Count).n
    except (msgspec.DecodeError, RecursionError):
        return 2  # A list of parameters: it belongs to a batch.


# --- answers ---


def told_in(raw: bytes) -> Told:
    """What an answer, or an event of a stream, tells of prompts and caches. Of a batch the sums."""
    try:
        found = _ANSWERS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return Told()
    answers = found if isinstance(found, list) else [found]
    pairs = [_told_of(one) for one in answers]
    prompt, cached = _sum([pair[0] for pair in pairs]), _sum([pair[1] for pair in pairs])
    return Told(prompt, cached, len(pairs))


def _told_of(answer: _Answer) -> tuple[int | None, int | None]:
    if answer.meta_info is not None:
        return answer.meta_info.prompt_tokens, answer.meta_info.cached_tokens
    if answer.usage is not None:
        details = answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens, None if details is None else details.cached_tokens
    return None, None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def error_in(raw: bytes) -> tuple[int, str] | None:
    """Status and sentence of an answer, or of an event, that says that the request has failed."""
    if b'"error"' not in raw and b'"abort"' not in raw:
        return None
    try:
        found = _ANSWERS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    for one in found if isinstance(found, list) else [found]:
        if isinstance(one.error, _Error):
            code = one.error.code
            return (code if isinstance(code, int) else 500), one.error.message or "no reason given"
        if isinstance(one.error, str):
            return 500, one.error
        finish = None if one.meta_info is None else one.meta_info.finish_reason
        if isinstance(finish, _Finish) and finish.type == "abort":
            return finish.status_code or 500, finish.message or "aborted"
    return None


def error_event(status: int, sentence: str) -> bytes:
    """An event of a stream that says that the request has failed, in SGLang's form."""
    error = {"message": sentence, "type": "router_error", "code": status, "retryable": True}
    return b"data: " + _ENCODER.encode({"error": error}) + b"\n\n"


def events_in(buffer: bytearray) -> Iterator[bytes]:
    """Takes the whole events of a stream out of ``buffer``; each has the empty line after it."""
    while (at := buffer.find(b"\n\n")) >= 0:
        event = bytes(buffer[: at + 2])
        del buffer[: at + 2]
        yield event


def event_json(event: bytes) -> bytes | None:
    """An event's JSON; None for the last event and for what is none."""
    if not event.startswith(b"data:"):
        return None
    text = event[5:].strip()
    return text if text.startswith((b"{", b"[{")) else None


def index_of(raw: bytes) -> int:
    """Which request of a batch an event of a stream belongs to; 0 without a batch."""
    try:
        return msgspec.json.decode(raw, type=_Index).index
    except (msgspec.DecodeError, RecursionError):
        return 0


def with_input_logprobs(decoded: bytes, prefilled: bytes) -> bytes:
    """The decode server's answer, or event, with what the prefill server's says of the prompt.

    Both are JSON objects, or lists of as many of them; else the answer stays as it is, and so does
    one in which one of the two is missing."""
    try:
        ours = msgspec.json.decode(decoded, type=Body | list[Body])
        theirs = msgspec.json.decode(prefilled, type=Body | list[Body])
        if isinstance(ours, list) and isinstance(theirs, list):
            if len(ours) != len(theirs):
                return decoded
            pairs = zip(ours, theirs, strict=True)
            return _ENCODER.encode([_merged(one, other) for one, other in pairs])
        if isinstance(ours, list) or isinstance(theirs, list):
            return decoded
        return _ENCODER.encode(_merged(ours, theirs))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decoded  # What is in them is read here, too.


def _merged(ours: Body, theirs: Body) -> Body:
    if "meta_info" not in ours or "meta_info" not in theirs:
        return ours
    name = "input_token_logprobs"
    mine = msgspec.json.decode(ours["meta_info"], type=Body)
    prefill = msgspec.json.decode(theirs["meta_info"], type=Body)
    lists = list[msgspec.Raw] | None
    first = msgspec.json.decode(prefill.get(name, _NULL), type=lists)
    if name not in mine or first is None:
        return ours
    second = msgspec.json.decode(mine[name], type=lists)
    mine[name] = msgspec.Raw(_ENCODER.encode([*first, *(second or ())]))
    return {**ours, "meta_info": msgspec.Raw(_ENCODER.encode(mine))}
