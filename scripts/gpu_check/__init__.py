# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu-check`: te on a machine with a GPU, in one command.

`command` is the command; `needs` and `build` make te; `steps` lists what is run, each step by
`runner` in processes of its own, which begin in `child`; `report` makes the results of it. These
import nothing but the standard library. The steps are in `facts`, `copying`, `pairs`, `endings`,
`with_torch` and `speed`; `side` is one of two processes that write to each other.
"""
