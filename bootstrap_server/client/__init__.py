# SPDX-License-Identifier: Apache-2.0
"""How a rank speaks to a registry: HTTP, proofs, calls, and the lease that it renews."""
