"""Refuse cross-site browser requests at gateways where callers need no key.

A web page may send a form or text to any site, and a gateway without keys serves everybody who reaches it.
Browsers name the page's site in `Origin` and `Sec-Fetch-Site`; other clients send neither header.
"""

from router.errors import Forbidden, excerpt
from router.http import Request

_SAFE_METHODS = ("GET", "HEAD")  # browsers hide their answers from pages of other sites
_OWN_SITES = ("same-origin", "none")  # none: caused by the user, who typed the address for example


def refuse_cross_site(request: Request) -> None:
    """Raise Forbidden for a request from a page of another site, unless its method only reads."""
    if request.method in _SAFE_METHODS:
        return
    headers = request.headers
    host = (headers.text(b"host") or "").lower()
    origin = headers.text(b"origin")
    site = headers.text(b"sec-fetch-site")
    foreign = origin is not None and origin.lower().partition("://")[2] != host
    if foreign or (site is not None and site.lower() not in _OWN_SITES):
        raise Forbidden(
            f"a page of another site ({excerpt(origin or site or '')!r}) may not call a gateway that asks "
            "for no key: give it keys, or have a proxy of yours drop Origin and Sec-Fetch-Site",
            code="cross_site",
        )
