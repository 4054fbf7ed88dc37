# SPDX-License-Identifier: Apache-2.0
"""What processes of the store tell each other, and over what."""
