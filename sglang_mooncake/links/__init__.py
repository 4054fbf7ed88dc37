# SPDX-License-Identifier: Apache-2.0
"""The control links between ranks: which of them stand, and what goes over them. One module per
side, as in `rooms/`; nobody else touches the sockets."""
