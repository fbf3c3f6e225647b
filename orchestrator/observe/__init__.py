"""What is observed of requests: metrics, spans and log lines, records, shadows."""
