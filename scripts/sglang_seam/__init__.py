# SPDX-License-Identifier: Apache-2.0
"""What our code uses of SGLang, found from our code, and what of it a release has or has changed.
Nothing is imported: releases are read."""
