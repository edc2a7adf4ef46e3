"""What a scheduler drives when there is no GPU: virtual time, simulated replicas, their costs and faults."""
