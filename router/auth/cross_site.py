"""Requests that a page of another site has a browser send: refused where callers need no key.

A page may send others a form or a text without asking them, and a gateway on this machine takes whoever
reaches it for its user. Browsers say where such a request comes from; other clients send no such headers.
"""

from router.errors import Forbidden
from router.http import Request

_READING = ("GET", "HEAD")  # browsers keep their answers from pages of other sites
_OF_ITS_OWN = ("same-origin", "none")  # none: the user's own doing, as a typed address


def refuse_cross_site(request: Request) -> None:
    """Raise Forbidden for what a page that did not come from this very gateway would change here."""
    if request.method in _READING:
        return
    headers = request.headers
    host = (headers.text(b"host") or "").lower()
    origin = headers.text(b"origin")
    site = headers.text(b"sec-fetch-site")
    foreign = origin is not None and origin.lower().partition("://")[2] != host
    if foreign or (site is not None and site.lower() not in _OF_ITS_OWN):
        raise Forbidden(
            f"a page of another site ({(origin or site or '')[:100]!r}) may not call a gateway that asks for "
            "no key: give it keys, or have a proxy of yours drop Origin and Sec-Fetch-Site",
            code="cross_site",
        )
