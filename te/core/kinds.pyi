# SPDX-License-Identifier: Apache-2.0
HOST: object
"""The capsule of host memory's kind."""
