"""`cadenza demo`: a simulated run with a live display."""
