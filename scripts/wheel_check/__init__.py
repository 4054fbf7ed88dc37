# SPDX-License-Identifier: Apache-2.0
"""What `scripts/wheel` does with what it has built."""
