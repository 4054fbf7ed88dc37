# SPDX-License-Identifier: Apache-2.0
"""Modules of others' names over te and kvstore, for code that was written for those."""
