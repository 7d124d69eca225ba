"""Client headers that are forwarded to engines and the batch process: tracing, content types, request ids.

vLLM puts `X-Request-Id` into every event of a stream and into every message between its processes, so that a
long one costs all requests of the engine. Values are therefore short and printable. A longer one is dropped,
as if it had not been sent: vLLM makes an id of its own then, and the gateway a trace of its own.
"""

import re
from collections.abc import Iterable, Mapping

from router.http.request import RawHeaders

_VISIBLE, _PRINTABLE = "[!-~]", "[ -~]"
_MOST: Mapping[bytes, tuple[str, int]] = {  # characters that a value may have, and how many
    b"accept": (_PRINTABLE, 256),
    b"content-type": (_PRINTABLE, 256),
    b"traceparent": (_VISIBLE, 128),
    b"tracestate": (_PRINTABLE, 512),  # the length that its standard asks to be passed on
    b"x-request-id": (_VISIBLE, 128),
}
_VALUES = {name: re.compile(b"%b{1,%d}" % (chars.encode(), most)) for name, (chars, most) in _MOST.items()}


def forwarded(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """Return the first header of each forwarded name, if its value is short and printable.

    A name that stands twice is passed on once, since two servers may choose differently between its values.
    """
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        if (lower := name.lower()) in _VALUES:
            first.setdefault(lower, value)
    return [(name, value) for name, value in first.items() if _VALUES[name].fullmatch(value)]
