"""`python -m hf_vq` is `hf-vq`."""

import sys

from .cli import main

sys.exit(main())
