"""Random schedules with injected faults, and the monitor that checks the invariants."""
