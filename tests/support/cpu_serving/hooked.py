# SPDX-License-Identifier: Apache-2.0
"""Has this package's hooks in SGLang once it is imported, for a nursery. SGLang then looks through
all names of all its modules for each of them, which in each process of a server takes half of a
CPU-second. A process that loads plugins later finds them there, and does all else."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_mooncake.sglang.plugin import register

register()
HookRegistry.apply_hooks()
