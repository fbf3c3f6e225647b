"""Generators and reward services: discovery, polls, and placement of sessions."""
