# SPDX-License-Identifier: Apache-2.0
"""A list of entries in Redis or Valkey, which those who are in it renew."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["DEFAULT_PORT", "KEYS", "SCHEMES", "SCRIPT", "RedisIndex"]

SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
DEFAULT_PORT: Final = 6379

# One question does all: it removes what is old, renews the caller's entry if it has one (or takes
# it out), and returns the list if it is not the one that the caller knows. By the server's clock
# alone. Entries of the future are removed, too, as they would stay for ever: a clock that was set
# back, or a stranger, has written them. KEYS: the entries by time, and the version of their set.
# ARGV: seconds, entry, known version, whether the caller leaves.
SCRIPT: Final = """
local time = redis.call('TIME')
local old = '(' .. (tonumber(time[1]) - tonumber(ARGV[1]))
local changed = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', old)
changed = changed + redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. time[1], '+inf')
if ARGV[4] == '1' then
  changed = changed + redis.call('ZREM', KEYS[1], ARGV[2])
elseif ARGV[2] ~= '' then
  changed = changed + redis.call('ZADD', KEYS[1], time[1], ARGV[2])
end
if changed > 0 then
  redis.call('SET', KEYS[2], time[1] .. '.' .. time[2])
end
local version = redis.call('GET', KEYS[2]) or ''
if version == ARGV[3] then
  return {version}
end
return {version, redis.call('ZRANGE', KEYS[1], 0, -1)}
"""
KEYS: Final = ("{kvstore}:owners", "{kvstore}:version")


class RedisIndex:
    """See ``members.Index``."""

    def __init__(self, url: str, timeout_s: float, kept_s: float) -> None:
        """``kept_s``: an entry that was not renewed for so long is removed. ``ImportError`` if the
        package ``redis`` is missing."""
        redis: Any = importlib.import_module("redis")
        self.errors: Final[tuple[type[Exception], ...]] = (
            redis.RedisError,
            OSError,
            ValueError,  # Of an answer of another shape, or with what is no number.
            RecursionError,  # Of what is nested too deeply.
            AttributeError,  # These are the package's, of a greeting of another shape.
            TypeError,
            LookupError,
        )
        self._kept_s = kept_s
        self._redis = redis.Redis.from_url(
            url.replace("valkey", "redis", 1),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1),  # On a broken connection.
        )
        self._script = self._redis.register_script(SCRIPT)

    def exchange(
        self,
        name: str,  # noqa: ARG002
        entry: bytes,
        known: bytes,
    ) -> tuple[bytes, Sequence[bytes] | None]:
        """See ``members.Index``."""
        return self._ask(entry, known, leaves=0)

    def leave(self, name: str, entry: bytes) -> None:  # noqa: ARG002
        """See ``members.Index``."""
        self._ask(entry, b"", leaves=1)

    def close(self) -> None:
        """See ``members.Index``."""
        self._redis.close()

    def _ask(self, entry: bytes, known: bytes, leaves: int) -> tuple[bytes, Sequence[bytes] | None]:
        answer: object = self._script(keys=KEYS, args=[self._kept_s, entry, known, leaves])
        match answer:
            case [bytes(version)]:
                return version, None
            case [bytes(version), [*entries]]:
                found = [one for one in entries if isinstance(one, bytes)]
                if len(found) == len(entries):
                    return version, found
        raise ValueError(f"it answers {answer!r:.100}, which is no list of owners")
