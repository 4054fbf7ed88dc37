# SPDX-License-Identifier: Apache-2.0
"""Prefill servers behind mini-lb, SGLang's router and this project's, under the same load."""
