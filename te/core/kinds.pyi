# SPDX-License-Identifier: Apache-2.0
HOST: object
"""The capsule of host memory's kind."""

NIC_ONLY: object
"""Of memory that only RDMA devices reach, and te does not copy."""
