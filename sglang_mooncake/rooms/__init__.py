# SPDX-License-Identifier: Apache-2.0
"""The life of a room, as rules without I/O: `states` (both sides), `prefill`, `decode`."""
