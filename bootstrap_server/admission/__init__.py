# SPDX-License-Identifier: Apache-2.0
"""Who is let in: secrets and proofs, and bounds for those who have not proved anything yet."""
