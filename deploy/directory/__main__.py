"""`python -m deploy.directory --config FILE.json`: the directory's process."""

import sys

from deploy.directory.hosted_directory import main

sys.exit(main())
