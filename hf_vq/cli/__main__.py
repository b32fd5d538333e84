"""`python -m hf_vq.cli`, for launchers that start modules."""

import sys

from . import main

sys.exit(main())
