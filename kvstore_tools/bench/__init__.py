# SPDX-License-Identifier: Apache-2.0
"""``kvstore bench``: the store beside its peers, in one run."""
