# SPDX-License-Identifier: Apache-2.0
"""What a process says of its store, as Prometheus reads it."""
