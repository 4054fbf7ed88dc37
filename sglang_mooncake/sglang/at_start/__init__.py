# SPDX-License-Identifier: Apache-2.0
"""What Python programs that `sglang-mooncake run` starts find on their path."""
