"""The kinds of rewards, one file per kind."""
