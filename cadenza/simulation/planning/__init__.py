"""`cadenza plan`: the best split of the devices, found by simulation."""
