"""Lists the paths of the Files and Batch APIs, for the gateway, the batch process and `/openapi.json`."""

import re
from collections.abc import Mapping
from urllib.parse import quote

from router.errors import NotFound, excerpt

PREFIXES = ("/v1/files", "/v1/batches")
# By path and method, the method of `BatchApi` that answers.
ROUTES: Mapping[str, Mapping[str, str]] = {
    "/v1/files": {"GET": "list_files", "POST": "upload"},
    "/v1/files/{file_id}": {"GET": "get_file", "DELETE": "delete_file"},
    "/v1/files/{file_id}/content": {"GET": "content"},
    "/v1/batches": {"GET": "list_batches", "POST": "create_batch"},
    "/v1/batches/{batch_id}": {"GET": "get_batch"},
    "/v1/batches/{batch_id}/cancel": {"POST": "cancel_batch"},
}
_PATTERNS = {re.compile(re.sub(r"\{\w+\}", "([^/]+)", path)): methods for path, methods in ROUTES.items()}


def find_route(path: str) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the methods that a decoded path takes, and the ids in it; raise NotFound for other paths."""
    for pattern, methods in _PATTERNS.items():
        if match := pattern.fullmatch(path):
            return methods, match.groups()
    raise NotFound(f"there is no {excerpt(path)}; /openapi.json lists the paths")


def canonical_target(path: str) -> bytes:
    """Return the request target that encodes a decoded path; raise NotFound for paths outside the table.

    The gateway checks `path`. The batch process gets this target instead of the client's, so that both see
    the same path however the client encoded it.
    """
    find_route(path)
    return quote(path).encode()
