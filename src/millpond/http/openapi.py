"""The schema of the API, OpenAPI 3.1, from the types that requests are decoded into."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from millpond.model import Health
from millpond.wire import CALLS, Call, arrow
from millpond.wire.codec import JSON, MSGPACK
from millpond.wire.replies import ErrorReply
from millpond.wire.staged import PARAMETERS

MEDIA_TYPES = (JSON.media_type, MSGPACK.media_type)
ARROW = {arrow.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}  # its columns are in the docs
REFUSALS = {
    400: "The request is wrong.",
    401: "No token, or one that does not count.",
    403: "The token is not for this, or the host is not ours.",
    404: "No such queue or item.",
    408: "The body came too slowly.",
    409: "Not in the present state.",
    413: "Too many items or bytes.",
    415: "Not of a media type that this call takes.",
    429: "A limit is reached; see Retry-After.",
    431: "Too many headers, or too long.",
    500: "A bug of ours.",
    501: "Not built yet, or not installed.",
    503: "Try again later; see Retry-After.",
    507: "The disk is full.",
}


@cache
def schema() -> dict[str, Any]:
    of_calls = [kind for call in CALLS.values() for kind in (call.request, call.reply)]
    types = [*dict.fromkeys(of_calls), ErrorReply, Health]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    references = dict(zip(types, refs, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "millpond",
            "version": version("millpond"),
            "description": "A durable work queue. Every call is a POST; replies are bare objects.",
        },
        "paths": {f"/v1/{call.name}": {"post": _operation(call, references)} for call in CALLS.values()}
        | _pages(references[Health]),
        "components": {
            "schemas": components,
            "responses": {str(status): _refusal(text, references[ErrorReply]) for status, text in REFUSALS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


@cache
def document() -> bytes:
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2)


def _operation(call: Call, references: dict[Any, Any]) -> dict[str, Any]:
    refusals = {str(status): {"$ref": f"#/components/responses/{status}"} for status in REFUSALS}
    takes_arrow = call.arrow == "request"
    content = _content(references[call.request]) | (ARROW if takes_arrow else {})
    return {
        "operationId": call.name,
        "tags": [call.name.partition(".")[0]],
        "summary": call.purpose,
        **({"parameters": [_parameter(name) for name in PARAMETERS]} if takes_arrow else {}),
        "requestBody": {"required": True, "content": content},
        "responses": ({"200": _success(call, references[call.reply])} if call.built else {}) | refusals,
    }


def _parameter(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "query",
        "description": "For a body of Arrow, which has no place for it; required then.",
        "schema": {"type": "string"},
    }


def _success(call: Call, reference: Any) -> dict[str, Any]:
    if call.name == "queue.subscribe":
        return {"description": "A line an item.", "content": {"application/x-ndjson": {"schema": reference}}}
    if call.arrow == "reply":
        cursor = {"description": "Of Arrow: the `next` of the page.", "schema": {"type": "string"}}
        return {
            "description": "Done.",
            "headers": {arrow.NEXT_HEADER: cursor},
            "content": _content(reference) | ARROW,
        }
    return {"description": "Done.", "content": _content(reference)}


def _refusal(text: str, reference: Any) -> dict[str, Any]:
    return {"description": text, "content": _content(reference)}


def _content(reference: Any) -> dict[str, Any]:
    return {media_type: {"schema": reference} for media_type in MEDIA_TYPES}


def _pages(health: Any) -> dict[str, Any]:
    in_json = {JSON.media_type: {"schema": health}}
    unwell = {"503": {"description": "No, and why.", "content": in_json}}
    refused = {str(status): {"$ref": f"#/components/responses/{status}"} for status in (401, 403, 404)}
    pages: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "/health": ("Whether the process answers.", in_json, unwell),
        "/ready": ("Whether it should be sent requests; 503 if not.", in_json, unwell),
        "/metrics": ("For Prometheus.", {"text/plain": {}, "application/openmetrics-text": {}}, refused),
        "/openapi.json": ("This schema.", {JSON.media_type: {}}, {}),
    }
    return {path: {"get": _page(path[1:], *told)} for path, told in pages.items()}


def _page(name: str, text: str, content: dict[str, Any], otherwise: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "Here it is.", "content": content}} | otherwise
    return {"operationId": name, "summary": text, "tags": ["server"], "responses": responses}
