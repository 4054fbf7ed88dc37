# SPDX-License-Identifier: Apache-2.0
"""The one process of a host that owns the store's memory there, and those that use it."""
