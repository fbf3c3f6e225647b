"""Latency against N: `make latency-vs-n`."""
