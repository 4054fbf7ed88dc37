# SPDX-License-Identifier: Apache-2.0
"""`scripts/nixl-beside`: programs written for NIXL, on this package and on NVIDIA's NIXL."""
