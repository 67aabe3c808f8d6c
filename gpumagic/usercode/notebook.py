"""Find the notebook of this process: its IPython shell, and the variables of its cells."""

import sys
from typing import Any


def shell() -> Any:
    """The IPython that this process is, or None; it is not imported for that."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def user_namespace() -> dict[str, Any]:
    """The variables of the notebook, or of the script."""
    ipython = shell()
    return vars(sys.modules["__main__"]) if ipython is None else ipython.user_ns
