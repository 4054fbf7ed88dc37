# SPDX-License-Identifier: Apache-2.0
"""Names of the pages of a prompt: prompts that begin alike have their first names in common. Pure.

Of tokens there are those of SGLang's radix cache, as its KV events tell them, and the router's own,
which cost a tenth and mean nothing outside of this process. Of text all are the router's own, and a
guess: texts that begin alike mostly begin with the same tokens.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Final

__all__ = [
    "LONG_NAMES",
    "NAMES_MAX",
    "NAME_BYTES",
    "TEXT_PAGE_BYTES",
    "TOKENS_MAX",
    "named_pages",
    "names_of",
    "own_names",
    "seed_of",
    "text_names",
    "token_digests",
]

TEXT_PAGE_BYTES: Final = 256
"""Length of a page of text: about as many tokens as one of 64 has."""
NAMES_MAX: Final = 8192
"""What comes behind so many pages is not named: each takes half a microsecond or more."""
TOKENS_MAX: Final = 1 << 17
"""But so many tokens are named at least, however short the pages are: so a server's own names reach
as far as the router's, which have 16 tokens each. Pages of one token take 0.1 s then."""
LONG_NAMES: Final = 1 << 10
"""More names of pages than that take a millisecond or more: they are made beside the event loop."""
_SALT_TAG: Final = b"sglang-cache-salt-v1\0"
NAME_BYTES: Final = 8
"""Of a page's digest, by which events name it."""


def named_pages(tokens: int, page_size: int) -> int:
    """How many whole pages of a prompt with so many tokens are named."""
    return min(tokens // page_size, max(NAMES_MAX, -(-TOKENS_MAX // page_size)))


def token_digests(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[bytes]:
    """The digests of the first ``named_pages`` of ``tokens``; none where a token is no number of 32
    bits. Their first 16 bytes are the keys of the pages in the store.

    A digest is SHA-256 over the one before it and the page's tokens, each 4 bytes, the lowest
    first. ``seed`` takes the place of the digest before the first page.
    """
    raw, step, digest = _bytes_of(tokens), 4 * page_size, seed
    digests = []
    for at in range(0, named_pages(len(raw) // 4, page_size) * step, step):
        digest = hashlib.sha256(digest + raw[at : at + step]).digest()
        digests.append(digest)
    return digests


def names_of(digests: Sequence[bytes]) -> list[int]:
    """The same pages as events name them: by the first 8 bytes."""
    return [int.from_bytes(one[:NAME_BYTES], "big", signed=True) for one in digests]


def own_names(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[int]:
    """Of the same pages as ``token_digests``; by these prompts are told apart within this process:
    a chain of Python's hashes, of bytes (SipHash), whose key nobody outside knows, and of pairs."""
    raw, step, name = _bytes_of(tokens), 4 * page_size, hash(seed)
    end = named_pages(len(raw) // 4, page_size) * step
    return [name := hash((name, raw[at : at + step])) for at in range(0, end, step)]


def _bytes_of(tokens: Sequence[int]) -> bytes:
    """4 bytes for each, the lowest first; none where one of them is no number of 32 bits."""
    try:
        numbers = array("I", tokens)
    except (OverflowError, TypeError):
        return b""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def seed_of(cache_salt: str | None, private: bytes = b"") -> bytes:
    """What SGLang's names begin with, for requests with a salt and for those without.

    ``private`` is what else keeps a request's cache apart from others' (adapter, extra key).
    SGLang's events do not tell that, so such names are the router's own.
    """
    salted = b"" if cache_salt is None else hashlib.sha256(_SALT_TAG + cache_salt.encode()).digest()
    return hashlib.sha256(salted + private).digest() if private else salted


def text_names(text: str, seed: bytes = b"") -> list[int]:
    """The names of its first ``NAMES_MAX`` whole pages, ``TEXT_PAGE_BYTES`` of UTF-8 each."""
    raw, digest = text.encode(errors="surrogatepass"), b"text" + seed
    names = []
    last = min(len(raw) - TEXT_PAGE_BYTES + 1, NAMES_MAX * TEXT_PAGE_BYTES)
    for at in range(0, last, TEXT_PAGE_BYTES):
        page = raw[at : at + TEXT_PAGE_BYTES]
        digest = hashlib.blake2b(digest + page, digest_size=16).digest()
        names.append(int.from_bytes(digest[:NAME_BYTES], "big", signed=True))
    return names
