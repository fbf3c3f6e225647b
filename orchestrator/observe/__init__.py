"""What is observed of requests: metrics, spans and log lines, and records."""
