# SPDX-License-Identifier: Apache-2.0
"""The only folder that knows SGLang: its plugin door, the classes that it constructs, its flags and
variables, its pools. Nothing beside this folder imports it, or SGLang."""
