"""One process per engine under comparison, each in its own environment."""
