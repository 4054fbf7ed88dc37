# SPDX-License-Identifier: Apache-2.0
"""A process that stores objects at owners and reads them."""
