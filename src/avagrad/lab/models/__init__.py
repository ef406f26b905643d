"""The models of the experiments, one readable file each."""
