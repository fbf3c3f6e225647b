"""Generators and reward services: discovery, reports, and placement of sessions."""
