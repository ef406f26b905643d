"""One page about a folder: figures, tables and findings, from records alone."""
