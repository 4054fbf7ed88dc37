# SPDX-License-Identifier: Apache-2.0
"""What an owner has, pinned, in memory and in a lower tier, and what it tells others. Pure."""
