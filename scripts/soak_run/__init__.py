# SPDX-License-Identifier: Apache-2.0
"""`scripts/soak`: servers on the store under load, while what they share changes or fails."""
