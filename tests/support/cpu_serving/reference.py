# SPDX-License-Identifier: Apache-2.0
"""What one ordinary server answered, kept in a file for a run that has no such server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpu_serving.processes import ServingError
from cpu_serving.traffic import Answer, Request

__all__ = ["read_reference", "write_reference"]


class _File(msgspec.Struct, frozen=True):
    #: What was asked of which model.
    key: str
    elapsed_s: float
    output_ids: list[list[int]]


def write_reference(
    path: Path,
    model: str,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    elapsed_s: float,
) -> None:
    """Keep the tokens of all answers; raises ServingError when a request has failed."""
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise ServingError(f"the ordinary server failed {len(errors)} requests: {errors[0]}")
    output_ids = [list(answer.output_ids) for answer in answers]
    path.write_bytes(msgspec.json.encode(_File(_key(model, requests), elapsed_s, output_ids)))


def read_reference(
    path: Path, model: str, requests: Sequence[Request]
) -> tuple[list[Answer], float]:
    """The answers to these requests, and the seconds that they took all together.

    Raises ServingError when the file cannot be read or answers other requests.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise ServingError(f"--reference {path} cannot be read: {error}") from error
    if found.key != _key(model, requests):
        raise ServingError(
            f"--reference {path} answers other requests; write it with --write-reference and the"
            " same --model, --requests, --max-prompt-tokens and --seed"
        )
    return [Answer(tuple(ids), None, 0.0) for ids in found.output_ids], found.elapsed_s


def _key(model: str, requests: Sequence[Request]) -> str:
    digest = hashlib.sha256(model.encode())
    for request in requests:
        digest.update(msgspec.json.encode((request.input_ids, request.new_tokens)))
    return digest.hexdigest()
