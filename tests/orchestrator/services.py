"""Names of `tests.world` that suites still import from here."""

from tests.world import *  # noqa: F403
from tests.world import World as Whole  # noqa: F401
from tests.world import world as whole  # noqa: F401
