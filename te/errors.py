# SPDX-License-Identifier: Apache-2.0
"""The exceptions of te, grouped by who has to change something."""

from __future__ import annotations

__all__ = [
    "BoundsError",
    "ClosedError",
    "ConnectError",
    "DeviceError",
    "DigestError",
    "Error",
    "FenceTimeout",
    "HandshakeError",
    "KeyMismatch",
    "ListenError",
    "ProtocolViolation",
    "QueueFull",
    "RegistrationError",
    "StatusSocketError",
    "TopologyError",
    "TransferFailed",
    "TransportMismatch",
    "VersionError",
    "WaitTimeout",
]


class Error(Exception):
    """Base of every error of this package. Bad values are ordinary ``ValueError``s."""


# The caller of this engine asked for something it may not have.


class RegistrationError(Error):
    """Memory cannot be registered or deregistered as asked; nothing was changed."""


class BoundsError(Error):
    """A block lies outside the registered memory it must lie in; no byte moved."""


class DigestError(Error):
    """Memory lies outside what is registered, or cannot be read; nothing was changed."""


class QueueFull(Error):
    """The peer has ``max_queued_transfers`` unfinished transfers; wait for some of them first."""


class ClosedError(Error):
    """The engine was closed."""


class ListenError(Error):
    """The engine cannot listen on the configured host and port."""


class DeviceError(Error):
    """An RDMA device cannot be used; the message says what is missing, or which verb failed."""


class TopologyError(Error, ValueError):
    """A filter or an override names something that is not there, or is not well-formed."""


# The far side, or the way to it, is not as it should be.


class ConnectError(Error):
    """A peer could not be reached, or is not the engine its card describes."""


class KeyMismatch(ConnectError):
    """The two engines have no key in common: they do not connect before one has others."""


class TransportMismatch(ConnectError):
    """No transport works between the two engines as they are: they do not connect before one of
    them has other transports, devices or another choice of encryption."""


class HandshakeError(Error):
    """A card or a greeting is not one of te's."""


class VersionError(HandshakeError):
    """The two engines speak different versions of te's protocol."""


class ProtocolViolation(Error):
    """A peer sent what the wire format does not allow; its connection is closed."""


class StatusSocketError(Error):
    """A process of this host could not be asked how it is, or could not answer (``te.status``)."""


class UsageError(Error):
    """Arguments of the command ``te`` that do not go together, or that this machine cannot do."""


# An outcome that was waited for.


class TransferFailed(Error):
    """A transfer failed; the message is its reason."""


class WaitTimeout(Error, TimeoutError):
    """``Transfer.wait`` timed out; the transfer goes on."""


class FenceTimeout(Error):
    """A write into this engine's memory did not end in time: the memory must not be reused yet."""
