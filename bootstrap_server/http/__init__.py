# SPDX-License-Identifier: Apache-2.0
"""A registry's routes: decode a request, ask the rules, encode the answer."""
