"""The studies of the paper: pure functions from trajectories to results, without a model."""
