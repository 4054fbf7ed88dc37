# SPDX-License-Identifier: Apache-2.0
"""A pool of KV-cache objects in the memory of many processes and hosts, on top of te."""
