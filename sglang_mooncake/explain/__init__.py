# SPDX-License-Identifier: Apache-2.0
"""Where the time of one request's hand-over went, over all ranks that took part in it."""
