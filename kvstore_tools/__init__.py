# SPDX-License-Identifier: Apache-2.0
"""Tools of the checkout: ``kvstore bench`` measures the store, ``kvstore replay`` cache sizes."""
