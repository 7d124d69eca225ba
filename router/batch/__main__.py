"""`python -m router.batch --config FILE.json`: the batch process."""

import sys

from router.batch.service import main

sys.exit(main())
