# SPDX-License-Identifier: Apache-2.0
"""The rules: what ranks and instances are, who is there, and who feeds whom. No I/O, no clock."""
