# SPDX-License-Identifier: Apache-2.0
"""Where objects lie that have no place in memory: one small contract, and what fulfils it."""
