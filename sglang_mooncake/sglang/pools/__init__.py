# SPDX-License-Identifier: Apache-2.0
"""From SGLang's pools, as `KVArgs` lists their pointers, to a `Layout`."""
