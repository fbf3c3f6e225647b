"""The HTTP gateway: OpenAI's API and server-sent events, on the orchestrator's public port."""
