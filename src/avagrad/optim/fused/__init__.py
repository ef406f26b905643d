"""One pass over memory for the whole step; the sum that the next norm needs is taken on the way."""
