"""Simulation: the virtual clock, and what the scheduler drives when there are no GPUs."""
