"""`python -m millpond.cli` is `millpond`."""

import sys

from millpond.cli.main import main

sys.exit(main())
