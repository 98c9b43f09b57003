"""Entry point of ``python -m tide_hf.cli``."""

import sys

from .main import main

sys.exit(main())
