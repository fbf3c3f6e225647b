"""The public port: conversion of messages, planning, admission, and serving of requests."""

from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer

__all__ = ["Admission", "Limits", "Orchestrator", "OrchestratorServicer"]
