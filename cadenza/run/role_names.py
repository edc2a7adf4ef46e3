"""The roles of a run, by the names that `devices`, workers and checkpoints know them by."""

ACTOR = "actor"
CRITIC = "critic"
REFERENCE = "reference"
INFERENCE = "inference"
REWARD = "reward"
