"""What is observed of requests: metrics, spans and log lines, records, shadows."""

from orchestrator.observe.request_records import OpenRecord, RequestRecords
from orchestrator.observe.shadows import Shadows

__all__ = ["OpenRecord", "RequestRecords", "Shadows"]
