# SPDX-License-Identifier: Apache-2.0
"""SGLang transfer backend: sender, receiver and manager over `te` and `bootstrap_server`."""
