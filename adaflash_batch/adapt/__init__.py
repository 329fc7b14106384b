"""Learning from finished trajectories."""
