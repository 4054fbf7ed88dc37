# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests with the connector for prefill and decode servers in the place of NIXL's: see
``scripts/vllm-tests``."""
