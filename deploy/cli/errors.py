"""What a person sees when something is wrong: a sentence, not a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.fleet import FleetFileError
from deploy.home import HomeError
from deploy.lifecycle.errors import LifecycleError
from traces.errors import ReplayError, TraceError


class CommandError(RuntimeError):
    """A command cannot go on; the text says why and what to do."""


EXPECTED = (
    *(CommandError, FleetFileError, HomeError, LifecycleError, FileExistsError),
    *(ReplayError, TraceError),
)


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except EXPECTED as error:
        print(f"conserve: {error}" if "\n" not in str(error) else str(error), file=sys.stderr)
        sys.exit(1)
