"""The version, in a file that does not import torch, so that a build can read it."""

__version__ = "0.1.0"
