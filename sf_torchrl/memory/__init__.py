"""Shared memory: the slab of rollouts, index pipes, and the weight store."""
