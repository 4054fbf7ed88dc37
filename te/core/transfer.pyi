# SPDX-License-Identifier: Apache-2.0
def stages() -> dict[str, dict[str, str]]:
    """The table of ``stages.h``: by stage, what may happen and the stage behind that."""
