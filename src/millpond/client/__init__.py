"""The clients: a millpond somewhere else, with the methods and types of the embedded engine."""

from millpond.client.async_client import AsyncClient
from millpond.client.client import Client

__all__ = ["AsyncClient", "Client"]
