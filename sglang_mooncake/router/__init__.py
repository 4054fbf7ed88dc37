# SPDX-License-Identifier: Apache-2.0
"""The router: takes clients' requests, and has a prefill and a decode server answer each of them.

It imports nothing of SGLang, and runs wherever SGLang runs.
"""
