# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM from its specifications (FIPS 197, NIST SP 800-38D), a byte at a time: slow, and
nobody else's code."""

from __future__ import annotations

import hmac
import itertools

__all__ = ["encrypt", "record", "record_key"]


def _times(a: int, b: int) -> int:
    """In the field of AES."""
    product = 0
    for _ in range(8):
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def _substitute(byte: int) -> int:
    inverse = next((x for x in range(256) if _times(byte, x) == 1), 0)
    turned = inverse
    for bits in range(1, 5):
        turned ^= (inverse << bits | inverse >> (8 - bits)) & 0xFF
    return turned ^ 0x63


_BOX = [_substitute(byte) for byte in range(256)]


def _round_keys(key: bytes) -> list[bytes]:
    words = [key[at : at + 4] for at in range(0, 32, 4)]
    constant = 1
    while len(words) < 60:
        word = words[-1]
        if len(words) % 8 == 0:
            word = bytes(_BOX[b] for b in word[1:] + word[:1])
            word = bytes([word[0] ^ constant]) + word[1:]
            constant = _times(constant, 2)
        elif len(words) % 8 == 4:
            word = bytes(_BOX[b] for b in word)
        words.append(bytes(a ^ b for a, b in zip(words[-8], word, strict=True)))
    return [b"".join(words[at : at + 4]) for at in range(0, 60, 4)]


def _block(keys: list[bytes], block: bytes) -> bytes:
    state = [a ^ b for a, b in zip(block, keys[0], strict=True)]
    for number, key in enumerate(keys[1:], 1):
        state = [_BOX[b] for b in state]
        state = [state[(at + 4 * (at % 4)) % 16] for at in range(16)]
        if number < 14:
            mixed = []
            for column in range(0, 16, 4):
                a = state[column : column + 4]
                mixed += [
                    _times(a[i], 2) ^ _times(a[(i + 1) % 4], 3) ^ a[(i + 2) % 4] ^ a[(i + 3) % 4]
                    for i in range(4)
                ]
            state = mixed
        state = [a ^ b for a, b in zip(state, key, strict=True)]
    return bytes(state)


def _hash(key: int, data: bytes) -> int:
    total = 0
    for at in range(0, len(data), 16):
        total ^= int.from_bytes(data[at : at + 16], "big")
        product, factor = 0, total
        for bit in range(127, -1, -1):
            product ^= factor if key >> bit & 1 else 0
            factor = (factor >> 1) ^ (0xE1 << 120 if factor & 1 else 0)
        total = product
    return total


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 16)


def encrypt(key: bytes, nonce: bytes, aad: bytes, text: bytes) -> bytes:
    """The ciphertext and its tag of 16 bytes."""
    keys = _round_keys(key)
    counters = (nonce + count.to_bytes(4, "big") for count in itertools.count(1))
    mask = _block(keys, next(counters))
    stream = b"".join(_block(keys, next(counters)) for _ in range(0, len(text), 16))
    sealed = bytes(a ^ b for a, b in zip(text, stream, strict=False))
    sizes = (8 * len(aad)).to_bytes(8, "big") + (8 * len(text)).to_bytes(8, "big")
    key_of_hash = int.from_bytes(_block(keys, bytes(16)), "big")
    tag = _hash(key_of_hash, _padded(aad) + _padded(sealed) + sizes) ^ int.from_bytes(mask, "big")
    return sealed + tag.to_bytes(16, "big")


def record_key(secret: bytes, generation: int) -> bytes:
    """What te encrypts with after so many changes of the key (te/transports/tcp/encryption.pxd)."""
    for _ in range(generation):
        secret = hmac.digest(secret, b"te next secret\0\x01", "sha256")
    return hmac.digest(secret, b"te record key\0\x01", "sha256")


def record(secret: bytes, number: int, rekey_records: int, text: bytes) -> bytes:
    """The record of that number on a connection."""
    generation, number = divmod(number, rekey_records)
    head = len(text).to_bytes(4, "little")
    nonce = bytes(4) + number.to_bytes(8, "little")
    return head + encrypt(record_key(secret, generation), nonce, head, text)
