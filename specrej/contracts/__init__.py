"""The values and interfaces that all parts share: requests, sessions, results.

Remote, local and toy generators and scorers satisfy the same Protocols, so one `run()` loop drives
all of them. Standard library only: no messages, models or policies.
"""

from specrej.contracts.requests import *  # noqa: F403
from specrej.contracts.results import *  # noqa: F403
from specrej.contracts.sessions import *  # noqa: F403
