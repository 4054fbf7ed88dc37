# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV cache in the store (``kvstore``)."""
