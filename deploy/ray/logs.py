"""Logs of our actors: standard error, which Ray keeps in a file for each worker."""

import logging

from router import logs


def log_to_stderr() -> None:
    logs.log_to_stderr()
    logging.getLogger("ray").setLevel(logging.WARNING)
