"""The public port: conversion of messages, plans, admission, and the way of a request."""

from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.service import Orchestrator
from orchestrator.edge.servicer import OrchestratorServicer

__all__ = ["Admission", "Limits", "Orchestrator", "OrchestratorServicer"]
