"""The schema as a page to read, and the page at `/`. Plain HTML: no scripts, nothing from elsewhere."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from html import escape
from typing import Any

import msgspec

from millpond.http import openapi
from millpond.wire import CALLS, Call

STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#5b6b7b;--line:#dde3ea;--page:#fbfcfd;--card:#fff;--mark:#0b6e8f;
--code:#eef3f7}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9ef;--soft:#93a3b3;--line:#2a3540;--page:#10161c;--card:#161e26;
--mark:#5cc3e6;--code:#1e2832}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem 5rem}
h1{font-size:2rem;line-height:1.2;margin:0 0 .25rem;letter-spacing:-.02em}
h2{font-size:1.05rem;margin:2.5rem 0 .75rem;color:var(--soft);font-weight:600}
p{margin:.25rem 0 1rem}a{color:var(--mark);text-underline-offset:.15em}
.lead{color:var(--soft);font-size:1.1rem}
code{font:.875em ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--code);padding:.1em .35em;
border-radius:.25rem}
pre{background:var(--code);padding:1rem;border-radius:.5rem;overflow-x:auto}pre code{background:none;padding:0}
details{background:var(--card);border:1px solid var(--line);border-radius:.5rem;margin:.5rem 0}
summary{cursor:pointer;padding:.7rem 1rem;display:flex;flex-wrap:wrap;gap:.25rem 1rem;align-items:baseline}
summary::-webkit-details-marker{display:none}summary:hover{color:var(--mark)}
summary:focus-visible{outline:2px solid var(--mark);outline-offset:-2px;border-radius:.5rem}
summary strong{font:600 .95rem ui-monospace,SFMono-Regular,Menlo,monospace}summary span{color:var(--soft)}
.inside{padding:0 1rem 1rem;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;margin:.25rem 0 1rem}
th,td{text-align:left;padding:.35rem .75rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}h3{font-size:.85rem;margin:.75rem 0 .25rem;color:var(--soft);font-weight:600}
.tag{font-size:.8rem;color:var(--soft);border:1px solid var(--line);border-radius:1rem;padding:0 .6rem}
"""

_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CONTENT_POLICY = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
)
EXAMPLE = """curl -s http://127.0.0.1:7410/v1/queues.create -H 'Content-Type: application/json' -d '{"name": "mail"}'
curl -s http://127.0.0.1:7410/v1/queue.produce -H 'Content-Type: application/json' \\
     -d '{"queue": "mail", "items": [{"text": "hello"}]}'
curl -s http://127.0.0.1:7410/v1/queue.lease -H 'Content-Type: application/json' \\
     -d '{"queue": "mail", "wait": "10s"}'"""
GROUPS = {
    "queues": "Queues",
    "queue": "Items of a queue",
    "items": "Looking at items",
    "claim": "Claims",
    "claims": "Claims",
    "consumer": "Claims",
    "stage": "Staged items",
}


@cache
def landing_page() -> bytes:
    return _page(
        "millpond",
        "<h1>millpond</h1><p class=lead>A durable work queue. This server is up.</p>"
        f"<pre><code>{escape(EXAMPLE)}</code></pre>"
        '<p><a href="/docs">All calls</a> · <a href="/openapi.json">OpenAPI schema</a> · '
        '<a href="/health">health</a> · <a href="/ready">ready</a></p>',
    )


@cache
def reference_page() -> bytes:
    groups: dict[str, list[Call]] = {}
    for call in CALLS.values():
        groups.setdefault(GROUPS[call.name.partition(".")[0]], []).append(call)
    sections = [f"<h2>{title}</h2>" + "".join(map(_call, calls)) for title, calls in groups.items()]
    return _page(
        "millpond: the HTTP API",
        "<h1>The HTTP API</h1><p class=lead>Every call is a <code>POST</code> with a JSON or MessagePack object; the "
        "reply follows <code>Accept</code>, else the request.</p>"
        "<p>Durations are seconds or strings such as <code>90s</code> and <code>1m30s</code>, instants RFC 3339 in "
        'UTC. An error reads <code>{"error": {"code", "message", "details"}}</code>. The same as a schema: '
        '<a href="/openapi.json">openapi.json</a>.</p>' + "".join(sections),
    )


def _page(title: str, body: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>'
        f'{title}</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{body}</main></body></html>"
    ).encode()


def _call(call: Call) -> str:
    later = "" if call.built else "<span class=tag>not built yet</span>"
    reply = f"<h3>Reply</h3>{_reply(call)}" if call.built else ""
    return (
        f'<details id="{call.name}"><summary><strong>/v1/{call.name}</strong><span>{_text(call.purpose)}</span>{later}'
        f"</summary><div class=inside><h3>Request</h3>{_fields(call.request.__name__, shows_default=True)}{reply}"
        "</div></details>"
    )


def _reply(call: Call) -> str:
    stream = "<p>A line each; <code>{}</code> is a sign of life.</p>" if call.name == "queue.subscribe" else ""
    return stream + _fields(call.reply.__name__, shows_default=False)


def _fields(name: str, *, shows_default: bool) -> str:
    """A table of a type's fields, and below it one for each type that they hold."""
    component = _component(name)
    properties: dict[str, Any] = component.get("properties", {})
    if not properties:
        return "<p><code>{}</code></p>"
    required = set(component.get("required", ())) if shows_default else set()
    rows = [_row(field, kind, field in required, shows_default) for field, kind in properties.items()]
    head = "<th>field</th><th>type</th>" + ("<th>default</th>" if shows_default else "")
    parts = [(field, part) for field, kind in properties.items() for part in _parts(kind)]
    inner = [f"<h3>{escape(field)}</h3>{_fields(part, shows_default=shows_default)}" for field, part in parts]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{''.join(inner)}"


def _row(field: str, kind: dict[str, Any], required: bool, shows_default: bool) -> str:
    cells = [f"<code>{escape(field)}</code>", escape(_type(kind))]
    if shows_default:
        cells.append("required" if required else _default(kind))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _default(kind: dict[str, Any]) -> str:
    default = kind.get("default")
    return "" if default in (None, "") else f"<code>{escape(msgspec.json.encode(default).decode())}</code>"


def _component(name: str) -> dict[str, Any]:
    found: dict[str, Any] = openapi.schema()["components"]["schemas"][name]
    return found


def _parts(kind: dict[str, Any]) -> Iterator[str]:
    """The types with fields that a schema leads to."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        if "properties" in _component(name):
            yield name
    for inner in [*kind.get("anyOf", ()), kind.get("items"), kind.get("additionalProperties")]:
        if isinstance(inner, dict):
            yield from _parts(inner)


def _type(kind: dict[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in kind:
        component = _component(kind["$ref"].rpartition("/")[2])
        return _type(component) if "enum" in component else "object"
    if "anyOf" in kind:
        return _either([one for one in kind["anyOf"] if one.get("type") != "null"])
    if "enum" in kind:
        return " or ".join(f'"{one}"' for one in kind["enum"] if one is not None)
    if kind.get("type") == "array":
        return f"list of {_type(kind['items'])}".replace("list of object", "list of objects")
    return _scalar(kind)


def _either(kinds: list[dict[str, Any]]) -> str:
    if {kind.get("type") for kind in kinds} == {"string", "integer", "number"}:
        return "duration"  # nothing else is any of the three
    return " or ".join(dict.fromkeys(map(_type, kinds)))


def _scalar(kind: dict[str, Any]) -> str:
    if kind.get("format") == "date-time":
        return "instant"
    if kind.get("contentEncoding") == "base64":
        return "base64"
    return str(kind.get("type", "any value"))


def _text(words: str) -> str:
    """Escaped, with what is in backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(words))
