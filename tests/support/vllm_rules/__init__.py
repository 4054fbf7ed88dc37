# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, and what collects the words of its workers, around the connector for
prefill and decode servers: run by ``tests/vllm/test_vllm_rules.py`` in vLLM's environment."""
