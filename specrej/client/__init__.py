"""The clients of the public API, and the command line."""

from specrej.client.client import Client, Retries
from specrej.client.sync_client import SyncClient

__all__ = ["Client", "Retries", "SyncClient"]
