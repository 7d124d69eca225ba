"""Client headers that are forwarded to engines and the batch process: tracing, content types, request ids.

vLLM puts `X-Request-Id` into every event of a stream and into every message between its processes, so that a
long id slows down all requests of the engine. Values must therefore be short and printable. Any other value
is dropped as if it had not been sent: vLLM then makes an id of its own, and the gateway a trace of its own.
"""

import re
from collections.abc import Iterable, Mapping

from router.http.request import RawHeaders

_VISIBLE, _PRINTABLE = "[!-~]", "[ -~]"
_MOST: Mapping[bytes, tuple[str, int]] = {  # allowed characters of a value, and its greatest length
    b"accept": (_PRINTABLE, 256),
    b"content-type": (_PRINTABLE, 256),
    b"traceparent": (_VISIBLE, 128),
    b"tracestate": (_PRINTABLE, 512),  # the length that its standard asks proxies to forward
    b"x-request-id": (_VISIBLE, 128),
}
_VALUES = {name: re.compile(b"%b{1,%d}" % (chars.encode(), most)) for name, (chars, most) in _MOST.items()}


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the first header of each forwarded name, if its value is short and printable.

    A repeated header is passed on once, because the gateway and an engine might choose different values.
    """
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        if (lower := name.lower()) in _VALUES:
            first.setdefault(lower, value)
    return [(name, value) for name, value in first.items() if _VALUES[name].fullmatch(value)]
