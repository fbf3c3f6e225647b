"""The clients of the public API and of the reward service, and the command line."""

from specrej.client.client import Client, Retries, RewardClient
from specrej.client.sync_client import SyncClient

__all__ = ["Client", "Retries", "RewardClient", "SyncClient"]
