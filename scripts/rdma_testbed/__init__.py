# SPDX-License-Identifier: Apache-2.0
"""Soft-RoCE and soft-iWARP devices in a user-mode Linux, for hosts whose kernel has none.

``kernel`` builds the kernel once and keeps it, ``packages`` brings what that and the guest need,
``guest`` is what runs inside before the command, ``boot`` runs the kernel as a child process,
``command`` is ``scripts/rdma-testbed``. Standard library alone, Python 3.9 or newer: it must run
before there is a virtual environment.
"""
