"""Reading data sets: files and archives to arrays."""
