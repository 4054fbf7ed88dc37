# SPDX-License-Identifier: Apache-2.0
"""LMCache's own tests with the store's adapter in the place of its mock: see
``scripts/lmcache-tests``."""
