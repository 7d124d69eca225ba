"""`python -m tests.simulated --seeds 2000`: run the control plane under faults, and check its invariants."""

import os
import sys

from tests.simulated import clock

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a run
        again = [sys.executable, "-m", "tests.simulated", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    clock.install()  # before any module of the product is imported
    from tests.simulated.campaign import main

    sys.exit(main())
