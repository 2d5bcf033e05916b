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

from millpond import errors
from millpond.http import openapi, refusals
from millpond.wire import CALLS, Call, arrow
from millpond.wire.staged import COLUMNS

STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#566574;--line:#dde3ea;--page:#fbfcfd;--card:#fff;--mark:#0b6885;
--code:#eef3f7}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9ef;--soft:#9aa9b8;--line:#2a3540;--page:#10161c;--card:#161e26;
--mark:#5cc3e6;--code:#1e2832}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:break-word}
main{max-width:48rem;margin:0 auto;padding:2.5rem 1.25rem 5rem}
h1{font-size:2rem;line-height:1.2;margin:0 0 .25rem;letter-spacing:-.02em}
h2{font-size:1.35rem;margin:3rem 0 1rem;letter-spacing:-.01em}
h3{font:600 1.05rem/1.4 ui-monospace,SFMono-Regular,Menlo,monospace;margin:0}
h4{font-size:.85rem;margin:1.25rem 0 .25rem;color:var(--soft);font-weight:600}
p{margin:.25rem 0 1rem}a{color:var(--mark);text-underline-offset:.15em}
h3 a{color:inherit;text-decoration:none}h3 a:hover,summary:hover{color:var(--mark)}
.lead{color:var(--soft);font-size:1.1rem}
code{font:.875em ui-monospace,SFMono-Regular,Menlo,monospace;background:var(--code);padding:.1em .35em;
border-radius:.25rem;overflow-wrap:anywhere}
pre{background:var(--code);padding:.75rem 1rem;border-radius:.5rem;margin:.75rem 0;line-height:1.45;
white-space:pre-wrap}
pre code{background:none;padding:0}
section{background:var(--card);border:1px solid var(--line);border-radius:.5rem;margin:1rem 0;padding:1rem 1.25rem}
section:target{border-color:var(--mark)}
section p{margin:.25rem 0 .5rem}
summary{cursor:pointer;color:var(--soft);font-weight:600;font-size:.85rem;margin-top:1rem}
:focus-visible{outline:2px solid var(--mark);outline-offset:2px;border-radius:.25rem}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;padding:.35rem 1rem .35rem 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:500}
td code{overflow-wrap:break-word}section td:first-child{width:34%}section td:nth-child(3){width:26%}
nav{font-size:.92rem;line-height:1.7}nav b{display:block;color:var(--soft);font-weight:600;margin-top:.75rem}
nav a{display:inline-block;text-decoration:none;margin-right:1rem}nav a:hover{text-decoration:underline}
.later{columns:2 14rem;padding:0;list-style:none}.later li{break-inside:avoid;margin-bottom:.5rem}
@media(min-width:64rem){.wide{max-width:68rem;display:grid;grid-template-columns:12rem minmax(0,1fr);gap:0 3rem}
nav{position:sticky;top:0;align-self:start;max-height:100vh;overflow-y:auto;padding:2.5rem 0}
.wide main{max-width:none;margin:0;padding-left:0}.wide{margin:0 auto;padding:0 1.25rem}nav a{display:block;margin:0}}
@media(max-width:63.99rem){.wide{max-width:48rem;margin:0 auto}.wide nav{padding:1.25rem 1.25rem 0}
.wide main{padding-top:1.5rem}}
@media(max-width:40rem){section{padding:.9rem}h1{font-size:1.7rem}th,td{padding-right:.6rem}
section td:first-child,section td:nth-child(3){width:auto}pre{padding:.75rem;font-size:.85rem}table{font-size:.86rem}}
"""

_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CONTENT_POLICY = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
)
ADDRESS = "127.0.0.1:7410"  # the default one: what a caller sees may be a proxy's
GROUPS = {
    "Queues": ("queues.create", "queues.update", "queues.info", "queues.list", "queues.delete"),
    "Produce and consume": (
        *("queue.produce", "queue.lease", "queue.subscribe", "queue.complete"),
        *("queue.retry", "queue.extend", "queue.state"),
    ),
    "Operate": (
        *("queue.stats", "queue.pause", "queue.resume", "queue.cancel"),
        *("queue.clear", "queue.redrive", "queue.bury", "queue.ready", "queue.rebalance", "queue.audit"),
    ),
    "Look at items": ("items.get", "items.list"),
    "Read in batches": (
        *("consumer.open", "queue.claim", "claim.read", "claim.verdict"),
        *("claim.complete", "claim.release", "claims.list"),
    ),
    "Write in batches": ("queue.stage", "stage.publish", "stage.abort"),
    "History": ("journal.read",),
}
EXAMPLES = {
    "queues.create": '{"name": "mail", "lease_timeout": "1m", "max_attempts": 3}',
    "queues.update": '{"name": "mail", "lease_timeout": "2m"}',
    "queues.info": '{"name": "mail"}',
    "queues.list": '{"prefix": "team-a/"}',
    "queues.delete": '{"name": "mail", "force": true}',
    "queue.produce": '{"queue": "mail", "items": [{"text": "hello"}, {"json": {"to": "ann"}, "delay": "10m"}]}',
    "queue.lease": '{"queue": "mail", "batch": 10, "wait": "20s"}',
    "queue.subscribe": '{"queue": "mail", "prefetch": 10}',
    "queue.complete": '{"leases": ["LEASE"]}',
    "queue.retry": '{"items": [{"lease": "LEASE", "error": "no route to host", "delay": "5m"}]}',
    "queue.extend": '{"leases": ["LEASE"], "lease_timeout": "5m"}',
    "queue.state": '{"lease": "LEASE", "version": 0, "state_doc": {"step": 1}}',
    "queue.stats": '{"queue": "mail"}',
    "queue.audit": '{"queue": "mail", "limit": 10}',
    "queue.rebalance": '{"queue": "mail", "partitions": 4, "dry_run": true}',
    "queue.pause": '{"queue": "mail"}',
    "queue.resume": '{"queue": "mail"}',
    "queue.cancel": '{"queue": "mail", "ids": ["ID"]}',
    "queue.bury": '{"queue": "mail", "ids": ["ID"], "error": "redriven by mistake"}',
    "queue.ready": '{"queue": "mail", "ids": ["ID"]}',
    "queue.clear": '{"queue": "mail", "states": ["ready", "dead"]}',
    "queue.redrive": '{"queue": "mail", "filter": {"error_contains": "no route"}, "dry_run": true}',
    "items.get": '{"queue": "mail", "id": "ID", "wait": "20s"}',
    "items.list": '{"queue": "mail", "state": "dead", "limit": 10}',
    "consumer.open": '{"queue": "mail", "consumer": "nightly"}',
    "queue.claim": '{"queue": "mail", "claim_id": "nightly:1", "epoch": 1, "max_items": 50000, "parts": 4}',
    "claim.read": '{"queue": "mail", "claim_id": "nightly:1", "epoch": 1, "part": 0, "limit": 10000}',
    "claim.verdict": '{"queue": "mail", "claim_id": "nightly:1", "epoch": 1,'
    ' "verdicts": [{"id": "ID", "verdict": "retry", "error": "no route to host"}]}',
    "claim.complete": '{"queue": "mail", "claim_id": "nightly:1", "epoch": 1}',
    "claim.release": '{"queue": "mail", "claim_id": "nightly:1", "epoch": 1}',
    "claims.list": '{"queue": "mail"}',
    "queue.stage": '{"queue": "mail", "txn": "import:1", "chunk": "a", "items": [{"text": "hello"}]}',
    "stage.publish": '{"queue": "mail", "txn": "import:1", "chunks": ["a"]}',
    "stage.abort": '{"queue": "mail", "txn": "import:1"}',
    "journal.read": '{"queue": "mail", "partition": 0, "after": 0}',
}
OTHER_REFUSALS = {405: "Calls are POST, pages GET.", 431: "The header is too large."}  # never of a well-made call

# ---- the pages --------------------------------------------------------------------------------------------


@cache
def landing_page() -> bytes:
    calls = ("queues.create", "queue.produce", "queue.lease", "queue.complete")
    return _page(
        "millpond",
        "<main><h1>millpond</h1><p class=lead>A durable work queue. This server is up.</p>"
        "<h2>Try it</h2><p>Make a queue, put items in, lease them, and complete each by the <code>lease</code> that "
        f"came with it.</p>{_curl(*calls)}<p>Where tokens are on, add "
        "<code>-H &quot;Authorization: Bearer $MILLPOND_TOKEN&quot;</code>.</p>"
        '<h2>Look</h2><p><a href="/docs">All calls</a> · <a href="/openapi.json">OpenAPI schema</a> · '
        '<a href="/health">health</a> · <a href="/ready">ready</a> · <a href="/metrics">metrics</a></p></main>',
    )


@cache
def reference_page() -> bytes:
    groups = [f"<h2>{title}</h2>" + "".join(_call(CALLS[name]) for name in names) for title, names in GROUPS.items()]
    return _page(
        "millpond: the HTTP API",
        f"<div class=wide>{_contents()}<main><h1>The HTTP API</h1>{_introduction()}{''.join(groups)}"
        f'<h2 id="errors">Errors</h2>{_errors()}</main></div>',
    )


def _page(title: str, body: str) -> bytes:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>'
        f'{title}</title><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{body}</body></html>"
    ).encode()


def _contents() -> str:
    groups = [
        f"<b>{title}</b>" + "".join(f'<a href="#{name}">{name}</a> ' for name in names)
        for title, names in GROUPS.items()
    ]
    more = '<b>More</b><a href="#errors">Errors</a> '
    return f'<nav aria-label="Calls">{"".join(groups)}{more}<a href="/openapi.json">openapi.json</a></nav>'


def _introduction() -> str:
    return (
        "<p class=lead>Every call is a <code>POST</code> of one JSON or MessagePack object; the reply follows "
        "<code>Accept</code>, else the request.</p>"
        "<p>Durations are seconds or texts such as <code>90s</code> and <code>1m30s</code>, instants RFC 3339 in UTC. "
        "An unknown field is an error. In items and results, fields with nothing to say are left out. In the examples "
        "<code>LEASE</code> stands for the <code>lease</code> of a leased item, <code>ID</code> for an item's "
        "<code>id</code>; where tokens are on, add <code>-H &quot;Authorization: Bearer $MILLPOND_TOKEN&quot;</code>."
        "</p>"
    )


def _errors() -> str:
    kinds = [kind for module in (errors, refusals) for kind in vars(module).values() if isinstance(kind, type)]
    codes: dict[int, list[str]] = {}
    for kind in kinds:
        if issubclass(kind, errors.MillpondError):
            codes.setdefault(kind.status, []).append(kind.code)
    texts = sorted((openapi.REFUSALS | OTHER_REFUSALS).items())
    rows = [(f"{status}", _names(codes[status]), _text(text)) for status, text in texts]
    return (
        '<p>An error reads <code>{"error": {"code", "message", "details"}}</code>; the message says what is wrong and '
        "what to do.</p>"
        f"<table><tr><th>status</th><th>code</th><th>meaning</th></tr>{''.join(map(_cells, rows))}</table>"
    )


def _names(codes: list[str]) -> str:
    return " ".join(f"<code>{code}</code>" for code in dict.fromkeys(codes) if code != errors.MillpondError.code)


# ---- a call -----------------------------------------------------------------------------------------------


def _call(call: Call) -> str:
    return (
        f'<section id="{call.name}"><h3><a href="#{call.name}">/v1/{call.name}</a></h3><p>{_text(call.purpose)}</p>'
        f"{_curl(call.name)}<h4>Request</h4>{_arrow_request(call)}{_fields(call.request.__name__, shows_default=True)}"
        f"<details><summary>Reply</summary>{_reply(call)}</details></section>"
    )


def _curl(*names: str) -> str:
    """No buffering where lines come one by one."""
    lines = [
        f"curl {'-N ' if name == 'queue.subscribe' else ''}{ADDRESS}/v1/{name} \\\n  --json '{EXAMPLES[name]}'"
        for name in names
    ]
    examples = escape("\n\n".join(lines), quote=False)
    return f"<pre><code>{examples}</code></pre>"


def _reply(call: Call) -> str:
    stream = "<p>A line each; <code>{}</code> is a sign of life.</p>" if call.name == "queue.subscribe" else ""
    return stream + _arrow_reply(call) + _fields(call.reply.__name__, shows_default=False)


def _arrow_reply(call: Call) -> str:
    if call.arrow != "reply":
        return ""
    columns = ", ".join(f"<code>{field.name}</code>" for field in arrow.ITEM_FIELDS)
    return (
        f"<p>With <code>Accept: {arrow.MEDIA_TYPE}</code> one Arrow IPC stream instead, of the columns {columns}; "
        f"<code>next</code> is then in the header <code>{arrow.NEXT_HEADER}</code>.</p>"
    )


def _arrow_request(call: Call) -> str:
    if call.arrow != "request":
        return ""
    columns = ", ".join(f"<code>{name}</code>" for name in COLUMNS)
    return (
        f"<p>Or, with <code>Content-Type: {arrow.MEDIA_TYPE}</code>, <code>queue</code>, <code>txn</code> and "
        f"<code>chunk</code> in the query string and the items as one Arrow IPC stream, of any of the columns "
        f"{columns}. All but the first may be left out.</p>"
    )


def _fields(name: str, *, shows_default: bool) -> str:
    """A table of a type's fields, and below it one for each type that they hold."""
    component = _component(name)
    properties: dict[str, Any] = component.get("properties", {})
    if not properties:
        return "<p><code>{}</code></p>"
    about = f"<p>{_text(component['description'])}</p>" if "description" in component else ""
    required = set(component.get("required", ())) if shows_default else set()
    rows = [_row(field, kind, field in required, shows_default) for field, kind in properties.items()]
    head = "<th>field</th><th>type</th>" + ("<th>default</th>" if shows_default else "")
    parts = [(field, part) for field, kind in properties.items() for part in _parts(kind)]
    inner = [
        f"<h4>In <code>{escape(field)}</code></h4>{_fields(part, shows_default=shows_default)}" for field, part in parts
    ]
    return f"{about}<table><tr>{head}</tr>{''.join(rows)}</table>{''.join(inner)}"


def _row(field: str, kind: dict[str, Any], required: bool, shows_default: bool) -> str:
    cells = (f"<code>{escape(field)}</code>", escape(_type(kind), quote=False))
    return _cells((*cells, "required" if required else _default(kind)) if shows_default else cells)


def _cells(cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _default(kind: dict[str, Any]) -> str:
    default = kind.get("default")
    if default in (None, ""):
        return ""
    shown = msgspec.json.format(msgspec.json.encode(default), indent=0)  # with spaces: a list may be broken at them
    return f"<code>{escape(shown.decode(), quote=False)}</code>"


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
        inner = _type(kind["items"])
        return f"list of {inner}s" if inner.isalpha() else f"list of {inner}"
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
