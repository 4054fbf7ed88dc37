# SPDX-License-Identifier: Apache-2.0
"""The wire format as data: what docs/wire.md and the fuzzers are made from."""
