# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers on a machine without a GPU: tiny models, start and stop, traffic, reports."""
