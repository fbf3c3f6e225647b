"""Generators and reward services: discovery, placement, failover and splitting of sessions."""

from orchestrator.backends.fleet import Fleet, Peer, PollSettings
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Resolver, Target
from orchestrator.backends.rewards import FleetRewards

__all__ = [
    "Fleet",
    "FleetGenerator",
    "FleetRewards",
    "Peer",
    "PollSettings",
    "Resolver",
    "Target",
]
