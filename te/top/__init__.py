# SPDX-License-Identifier: Apache-2.0
"""``te top``: the live rails of all engines of this user's processes, in the terminal.

``rates`` and ``lines`` are pure: what two looks at the engines make, and how it is set on a screen.
"""
