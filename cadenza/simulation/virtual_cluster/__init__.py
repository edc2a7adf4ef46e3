"""The virtual cluster: the clock, and the replicas, envs and faults that the scheduler drives under it."""
