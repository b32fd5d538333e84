"""Fixtures of calibration."""

from tests.fixtures.calibration import calibrate  # noqa: F401
