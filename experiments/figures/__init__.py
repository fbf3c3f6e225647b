"""Charts of the studies."""
