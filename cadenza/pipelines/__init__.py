"""The controller programs: each reads like the algorithm it is."""
