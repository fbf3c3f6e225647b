"""Attacks over the wire on real processes: what they cost other tenants."""
