# SPDX-License-Identifier: Apache-2.0
"""`scripts/sglang-releases`: tries releases of SGLang, and says in a table what each one did."""
