"""Backends: what moves the parameters of a step. Each restates the element-wise rule, and nothing else."""
