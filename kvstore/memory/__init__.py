# SPDX-License-Identifier: Apache-2.0
"""An owner's memory: size classes and slots, and which object goes first."""
