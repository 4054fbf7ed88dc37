# SPDX-License-Identifier: Apache-2.0
"""What an object of the store is: its key and meaning, its header, its bytes."""
