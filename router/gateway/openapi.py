"""OpenAPI description of a gateway, made from its routes and from the known fields (`fields.py`).

A field's schema is as exact as the gateway's check of it, and never narrower than what engines accept: for
example, a message's content is any JSON.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from router.requests.fields import UnknownFields, fields_of

_TEXT: Mapping[str, Any] = {"type": "string"}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": _TEXT, "content": {}},  # parts, or null with tool calls
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_ITEMS = {"anyOf": [_TEXT, {"type": "array", "items": {}}]}
# Schemas of fields that the engines check and the gateway does not.
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "model": _TEXT,
    "messages": _MESSAGES,
    "prompt": _ITEMS,
    "input": _ITEMS,
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "user": _TEXT,
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "service_tier": {"enum": ["auto", "default", "flex"]},
}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("model", "messages"),
    "/v1/completions": ("model", "prompt"),
    "/v1/responses": ("model", "input"),
    "/v1/messages": ("model", "messages", "max_tokens"),
    "/v1/messages/count_tokens": ("model", "messages"),
    "/v1/embeddings": ("model", "input"),
    "/tokenize": ("model",),
    "/detokenize": ("model", "tokens"),
}
_NEW_BATCH = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]},
        "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,4}[hd]$"},
        "metadata": {"type": "object", "additionalProperties": _TEXT},
        "output_expires_after": {"type": "object"},
    },
}
_NEW_FILE = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
}


def document(routes: Mapping[str, Iterable[str]], unknown: UnknownFields, max_answers: int) -> bytes:
    """Return the OpenAPI document of `routes`: methods by path, with parameters in braces.

    `unknown`: how the gateway treats fields that it does not know. `max_answers`: the most answers that one
    request may ask for.
    """
    paths = {
        path: {one.lower(): _operation(path, one, unknown, max_answers) for one in routes[path]}
        for path in sorted(routes)
    }
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "ConServe", "version": "1"},
            "components": {
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
                "schemas": {"Error": {"type": "object", "properties": {"error": {"type": "object"}}}},
            },
            "security": [{"key": []}],
            "paths": paths,
        }
    )


def _operation(path: str, method: str, unknown: UnknownFields, max_answers: int) -> dict[str, Any]:
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    made: dict[str, Any] = {
        "responses": {
            "200": {"description": "as OpenAI's or Anthropic's API says"},
            "4XX": {"description": "what is wrong with the request", "content": refused},
            "503": {"description": "not now; see Retry-After", "content": refused},
        }
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        made["parameters"] = [{"name": one, "in": "path", "required": True, "schema": _TEXT} for one in names]
    if method == "POST" and (content := _body(path, unknown, max_answers)) is not None:
        made["requestBody"] = {"required": True, "content": content}
    return made


def _body(path: str, unknown: UnknownFields, max_answers: int) -> dict[str, Any] | None:
    if path == "/v1/files":
        return {"multipart/form-data": {"schema": _NEW_FILE}}
    if path == "/v1/batches":
        return {"application/json": {"schema": _NEW_BATCH}}
    if path not in _NEEDED:
        return None
    properties = {name: check.schema or _SHAPES.get(name, {}) for name, check in fields_of(path).items()}
    if "n" in properties:
        properties["n"] = {**properties["n"], "maximum": max_answers}
    schema = {
        "type": "object",
        "required": list(_NEEDED[path]),
        "properties": properties,
        "additionalProperties": unknown is UnknownFields.DROP,
    }
    return {"application/json": {"schema": schema}}
