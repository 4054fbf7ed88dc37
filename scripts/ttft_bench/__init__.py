# SPDX-License-Identifier: Apache-2.0
"""Time to first token of one ordinary server, of PD, and of PD layer by layer, side by side."""
