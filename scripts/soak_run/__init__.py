# SPDX-License-Identifier: Apache-2.0
"""`scripts/soak`: servers under load, while something happens to them, or to what they share."""
