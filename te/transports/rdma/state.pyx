# cython: language_level=3
# SPDX-License-Identifier: Apache-2.0
# Python's view of `RailReason`; state.pyi tells type checkers of it.
