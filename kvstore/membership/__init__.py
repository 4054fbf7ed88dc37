# SPDX-License-Identifier: Apache-2.0
"""Where the owners of several hosts are."""
