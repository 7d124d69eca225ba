"""Runs the batch process: `python -m router.batch --config FILE.json`."""

import sys

from router.batch.service import main

sys.exit(main())
