"""The heart: the life of every single sample, from task to fate."""
