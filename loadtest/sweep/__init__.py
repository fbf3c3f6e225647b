"""Latency against N, measured: `make latency-vs-n`."""
