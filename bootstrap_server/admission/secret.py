# SPDX-License-Identifier: Apache-2.0
"""The deployment's secret, and the keys that its channels have of it. Pure: see `secret_file.py`.

All servers of a deployment have the same list of secrets. What is made is made with the first,
what comes is accepted with any, so that the list [old, new], then [new, old], then [new], each on
all servers before the next one, replaces a secret without a moment in which two servers share none.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final

__all__ = ["KEY_BYTES", "SECRETS_MAX", "Keys", "hkdf", "mac", "new_secret", "split_secrets"]

KEY_BYTES: Final = 32
#: A rotation needs two.
SECRETS_MAX: Final = 4
#: What `openssl rand -hex 16` and `openssl rand -base64 24` print: words that people think of are
#: shorter.
SECRET_CHARS_MIN: Final = 32
SECRET_CHARS_MAX: Final = 1024
#: 32 random hexadecimal digits have fewer in one of 30 million cases.
DISTINCT_MIN: Final = 8
#: So many characters that stand there twice are a word that somebody has repeated: in 64 random
#: hexadecimal digits they do in one of 2 million cases.
REPEATED_CHARS: Final = 8
_HASH_BYTES: Final = 32
_SALT: Final = b"sglang-mooncake secret, version 1"


@dataclass(frozen=True)
class Keys:
    """The keys of each channel, one per secret, in the order of the secrets; empty without one.

    `registry` authenticates requests to the registry and its answers, `record` signs what ranks
    say of themselves there, `control` is for links between ranks, `data` for the transfer engine.
    """

    registry: tuple[bytes, ...] = field(default=(), repr=False)
    record: tuple[bytes, ...] = field(default=(), repr=False)
    control: tuple[bytes, ...] = field(default=(), repr=False)
    data: tuple[bytes, ...] = field(default=(), repr=False)

    @staticmethod
    def from_secrets(secrets: Sequence[bytes]) -> Keys:
        """The keys of a list of secrets (`split_secrets`)."""
        return Keys(*(_channel_keys(secrets, name) for name in Keys.__dataclass_fields__))

    def __bool__(self) -> bool:
        """Whether there is a secret."""
        return bool(self.registry)


def _channel_keys(secrets: Sequence[bytes], channel: str) -> tuple[bytes, ...]:
    label = f"sglang-mooncake {channel}".encode("ascii")
    return tuple(hkdf(secret, _SALT, label, KEY_BYTES) for secret in secrets)


def hkdf(secret: bytes, salt: bytes, label: bytes, length_bytes: int) -> bytes:
    """HKDF with SHA-256 (RFC 5869); `label` is its `info`."""
    if not 0 < length_bytes <= 255 * _HASH_BYTES:
        raise ValueError(f"HKDF cannot make {length_bytes} bytes")
    extracted = hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")
    made = block = b""
    while len(made) < length_bytes:
        number = len(made) // _HASH_BYTES + 1
        block = hmac.digest(extracted, block + label + bytes([number]), "sha256")
        made += block
    return made[:length_bytes]


def mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """HMAC with SHA-256 over `parts`, each with its length, so that none can run into the next;
    `label` keeps the uses of one key apart. 32 bytes."""
    text = b"".join(len(part).to_bytes(8, "big") + part for part in (label, *parts))
    return hmac.digest(key, text, "sha256")


def new_secret() -> str:
    """A secret of 256 random bits, as 64 hexadecimal digits."""
    return token_hex(KEY_BYTES)


def split_secrets(text: str) -> list[bytes]:
    """The secrets in `text`, one a line; empty lines do not count.

    Raises `ValueError` with a sentence that shows nothing of them: for none, too many, the same
    one twice, and for one that is too short or not random.
    """
    lines = [line for line in (part.strip() for part in text.split("\n")) if line]
    if not lines:
        raise ValueError("there is no secret in it; `sglang-mooncake secret` makes one")
    if len(lines) > SECRETS_MAX:
        raise ValueError(f"{len(lines)} secrets, at most {SECRETS_MAX} are allowed, one a line")
    for number, line in enumerate(lines, 1):
        _check(f"the secret on line {number}" if len(lines) > 1 else "the secret", line)
    if len(set(lines)) < len(lines):
        raise ValueError("the same secret stands there twice")
    return [line.encode("ascii") for line in lines]


def _check(which: str, line: str) -> None:
    # Spaces inside: several secrets that somebody has put on one line.
    if not line.isascii() or not line.isprintable() or " " in line:
        raise ValueError(f"{which} has characters other than printable ASCII without spaces")
    if len(line) < SECRET_CHARS_MIN:
        raise ValueError(
            f"{which} has {len(line)} characters, at least {SECRET_CHARS_MIN} are needed; "
            "`sglang-mooncake secret` makes one of 64"
        )
    if len(line) > SECRET_CHARS_MAX:
        raise ValueError(f"{which} has {len(line)} characters, more than {SECRET_CHARS_MAX}")
    if len(set(line)) < DISTINCT_MIN:
        raise ValueError(
            f"{which} has fewer than {DISTINCT_MIN} different characters and can be guessed; "
            "`sglang-mooncake secret` makes a random one"
        )
    starts = range(len(line) - REPEATED_CHARS + 1)
    if len({line[at : at + REPEATED_CHARS] for at in starts}) < len(starts):
        raise ValueError(
            f"{which} says the same {REPEATED_CHARS} characters twice and can be guessed; "
            "`sglang-mooncake secret` makes a random one"
        )
