# SPDX-License-Identifier: Apache-2.0
"""Where the owners of a host, or of several, are."""
