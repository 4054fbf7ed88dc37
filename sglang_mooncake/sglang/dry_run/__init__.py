# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake plan`: who would send what to whom, without a server.

The plans are those of the hand-over itself (`bootstrap_server.ranks.matching`, `sources`,
`layout.Plan`), made of ranks that do not exist: `flags.py` says which they are, `models.py` what
they store, `pairs.py` has them planned, `report.py` puts the result into words.
"""
