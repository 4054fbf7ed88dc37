# SPDX-License-Identifier: Apache-2.0
"""vLLM's connectors: the only folder that knows vLLM's hooks and types."""
