"""Fixtures that tests without a GPU have, too."""

from tests.fixtures.calibration import calibrate  # noqa: F401
from tests.fixtures.static_generation import counters  # noqa: F401
