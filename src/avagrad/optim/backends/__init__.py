"""Backends move the parameters of a step. Each implements the element-wise rule, and nothing else."""
