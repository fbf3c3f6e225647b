"""Generators and reward services: discovery, placement, failover and splitting of sessions."""
