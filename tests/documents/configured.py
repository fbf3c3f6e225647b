"""Check a service's settings instead of starting it: `python -m tests.documents.configured`.

Without arguments the settings of all services, from the environment; with the name of a service,
its own, also from the flags that follow.
"""

from __future__ import annotations

import sys

from deploy.values_schema import SETTINGS
from specrej.settings import load

if __name__ == "__main__":
    names = sys.argv[1:2] or list(SETTINGS)
    for name in names:
        load(SETTINGS[name.removesuffix("_service")], sys.argv[2:])
