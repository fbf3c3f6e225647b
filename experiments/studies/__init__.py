"""What the paper asks, each question a file: from trajectories to a result, without a model."""
