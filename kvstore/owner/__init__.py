# SPDX-License-Identifier: Apache-2.0
"""A process that lends memory, and answers others."""
