"""The production scheduler on a virtual clock, over simulated replicas and envs.

    virtual_cluster/  the event loop with virtual time, the simulated replica and its cost model, faults
    fuzzing/          `cadenza fuzz`: random schedules with faults, and the monitor that checks the invariants
    comparison/       `cadenza simulate`: scheduling strategies side by side on the same workloads
    planning/         `cadenza plan`: the split of the devices with the shortest steps, found by simulation
    demo/             `cadenza demo`: one simulated run with a live display

`comparison` and `fuzzing` use `virtual_cluster`; `planning` uses `comparison`. `quiet.py` silences the scheduler's log.
"""
