# SPDX-License-Identifier: Apache-2.0
"""Settings: rows of a table, kinds of values, the TOML file, and those of a registry by itself."""
