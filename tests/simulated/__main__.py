"""`python -m tests.simulated --seeds 2000`: run the control plane under faults, and check its invariants."""

import sys

from tests.simulated import clock

if __name__ == "__main__":
    clock.install()  # before any module of the product is imported
    from tests.simulated.campaign import main

    sys.exit(main())
