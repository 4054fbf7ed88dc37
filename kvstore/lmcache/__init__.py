# SPDX-License-Identifier: Apache-2.0
"""LMCache's objects in the store."""
