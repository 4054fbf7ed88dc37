# SPDX-License-Identifier: Apache-2.0
"""``te bench``: te beside its peers and beside the least such a copy can cost, on this machine.

``runner`` alternates contenders, each in a pair of worker processes (``worker``, ``pairs``);
``contenders`` holds one small class for each; ``shapes``, ``pattern``, ``report`` and ``bars``
are pure.
"""
