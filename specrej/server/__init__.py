"""The gRPC server of every service: admission of callers, statuses, health, drain."""
