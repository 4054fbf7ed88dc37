# SPDX-License-Identifier: Apache-2.0
"""``scripts/test``: which commands prove what (``plan``), and running them in lanes (``lanes``).

Standard library alone.
"""
