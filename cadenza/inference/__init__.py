"""Inference: the replica protocol and the engines that fulfil it."""
